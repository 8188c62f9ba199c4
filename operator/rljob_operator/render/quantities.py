"""Kubernetes quantities as numbers."""

from __future__ import annotations

import math
from decimal import Decimal

_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def to_bytes(quantity: str) -> int:
    """Bytes of a quantity like `64Gi`; a fraction of a byte counts as one."""
    for unit, factor in _UNITS.items():
        if quantity.endswith(unit):
            return math.ceil(Decimal(quantity[: -len(unit)]) * factor)
    return math.ceil(Decimal(quantity))


def to_cores(quantity: str) -> int:
    """Whole cores of a CPU quantity like `500m`, rounded up as KubeRay does for Ray's `num-cpus`."""
    if quantity.endswith("m"):
        return math.ceil(Decimal(quantity[:-1]) / 1000)
    return math.ceil(Decimal(quantity))


def mebibytes(count: int) -> str:
    """A number of bytes as whole MiB, rounded down."""
    return f"{count // 2**20}Mi"
