"""Kubernetes quantities."""

from __future__ import annotations

_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def to_bytes(quantity: str) -> int:
    """Bytes of a quantity such as `2Gi` or `1.5G`."""
    for suffix, factor in _UNITS.items():
        if quantity.endswith(suffix):
            return int(float(quantity.removesuffix(suffix)) * factor)
    return int(float(quantity))
