"""Kubernetes quantities as numbers."""

from __future__ import annotations

import math
from decimal import Decimal

_BINARY = {unit: 2 ** (10 * power) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)}
_DECIMAL = {unit: 10 ** (3 * power) for power, unit in enumerate("kMGTPE", 1)}
_UNITS = _BINARY | _DECIMAL


def to_number(quantity: str) -> int:
    """Bytes of a quantity like `64Gi`, or a count like `8` or `2k`; a fraction counts as one."""
    return math.ceil(_in_units(quantity))


def to_decimal(quantity: str) -> Decimal:
    """The exact number of any quantity, `500m` and `1e3` included."""
    small = {"n": 9, "u": 6, "m": 3}.get(quantity[-1:], 0)
    if small:
        return Decimal(quantity[:-1]).scaleb(-small)
    return _in_units(quantity)


def _in_units(quantity: str) -> Decimal:
    for unit, factor in _UNITS.items():
        if quantity.endswith(unit):
            return Decimal(quantity.removesuffix(unit)) * factor
    return Decimal(quantity)


def to_cores(quantity: str) -> int:
    """Whole cores of a CPU quantity like `500m`, rounded up as KubeRay does for Ray's `num-cpus`."""
    if quantity.endswith("m"):
        return math.ceil(Decimal(quantity[:-1]) / 1000)
    return math.ceil(Decimal(quantity))


def mebibytes(count: int) -> str:
    """A number of bytes as whole MiB, rounded down."""
    return f"{count // 2**20}Mi"
