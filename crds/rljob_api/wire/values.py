"""Values of JSON that another program wrote, checked: Python's reader lets NaN, infinities and any integer through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LARGEST_COUNT = 2**53 - 1
"""Above it JSON readers of other languages round."""
_LARGEST = 1e300
_LONGEST_SECONDS = 1e9
"""Thirty years: sums of such times, and times the steps that are left, are numbers that a status can hold."""


class WireError(ValueError):
    """A value from the border is not what its type says; the message names the value and the field."""


def whole(value: object, where: str, most: int = LARGEST_COUNT) -> int:
    """A whole number from 0 to `most`."""
    if type(value) is int and 0 <= value <= most:
        return value
    limit = "" if most == LARGEST_COUNT else f" to {most}"
    raise WireError(f"{where} must be a whole number from 0{limit}, not {shown(value)}")


def number(value: Any, where: str) -> float:
    """A finite number, as it is."""
    if type(value) in (float, int) and -_LARGEST < value < _LARGEST:
        return value
    raise WireError(f"{where} must be a finite number, not {shown(value)}")


def seconds(value: object, where: str) -> float:
    """A duration that is none or lasts."""
    if type(value) is float and 0.0 <= value <= _LONGEST_SECONDS:
        return value
    value = number(value, where)
    if value < 0:
        raise WireError(f"{where} must not be negative, but is {value:g}")
    if value > _LONGEST_SECONDS:
        raise WireError(f"{where} must be at most {_LONGEST_SECONDS:g}, but is {value:g}")
    return value


def block(value: object, where: str) -> Mapping[str, Any]:
    """An object."""
    if isinstance(value, dict):
        return value
    raise WireError(f"{where} must be an object, not {shown(value)}")


def text(value: object, where: str) -> str:
    """A text."""
    if isinstance(value, str):
        return value
    raise WireError(f"{where} must be a text, not {shown(value)}")


def shown(value: object) -> str:
    """A value for a message, never long."""
    if value is None or isinstance(value, str | float | bool):
        return repr(value)[:40]
    # Python refuses to write out an integer of thousands of digits.
    return str(value) if isinstance(value, int) and abs(value) <= LARGEST_COUNT else type(value).__name__


def finite(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """JSON has no NaN: what `number` would refuse becomes null, so that a reader cannot take it for a number."""
    return {
        name: value if value is not None and -_LARGEST < float(value) < _LARGEST else None
        for name, value in values.items()
    }
