"""CANN's Python package, as far as Ray and vllm-ascend call it."""

from acl import rt as rt


def get_soc_name() -> str:
    return "Ascend910B1"
