"""What Ray and vllm-ascend ask of CANN's Python package."""

from acl import rt as rt


def get_soc_name() -> str:
    return "Ascend910B1"
