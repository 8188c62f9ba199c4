"""Values that cross from one process into another as plain data: nothing that has code of its own. Standard library.

`pack` gives what JSON has; `unpack` gives built-in types alone, from any JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LISTS: tuple[tuple[str, Any], ...] = (("tuple", tuple), ("set", set), ("frozenset", frozenset))
_SAFE_INTEGER = 2**63


class NotPlainError(TypeError):
    """A value has code of its own."""


def pack(value: object, other: Callable[[object], object] | None = None) -> object:
    """A value as JSON has it.

    Args:
        value: to be packed.
        other: what becomes of one that is none of the built-in types.

    Raises:
        NotPlainError: without `other`, naming the type.
    """
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str.__str__(value)
    if isinstance(value, int):
        plain = int.__index__(value)
        # Decimal digits of long numbers are refused on both ends.
        return plain if -_SAFE_INTEGER <= plain < _SAFE_INTEGER else {"int": hex(plain)}
    if isinstance(value, float):
        return float.__add__(value, 0.0)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, list):
        return [pack(item, other) for item in list.__iter__(value)]
    for name, kind in _LISTS:
        if isinstance(value, kind):
            return {name: [pack(item, other) for item in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[pack(key, other), pack(item, other)] for key, item in dict.items(value)]}
    if other is not None:
        return other(value)
    raise NotPlainError(f"a {type(value).__name__} is no plain value")


def unpack(packed: object, other: Callable[[str, Any], object] | None = None) -> Any:
    """The value that was packed.

    Args:
        packed: of `json.loads`.
        other: gives the value of what `pack` was made to pack in another way.

    Raises:
        ValueError: it was not made by `pack`.
    """
    if packed is None or isinstance(packed, bool | int | float | str):
        return packed
    if isinstance(packed, list):
        return [unpack(item, other) for item in packed]
    if not isinstance(packed, dict) or len(packed) != 1:
        raise ValueError("no packed value")
    name: str
    ((name, content),) = packed.items()
    if name in dict(_LISTS) and isinstance(content, list):
        return _hashed(dict(_LISTS)[name], [unpack(item, other) for item in content])
    if name == "dict" and isinstance(content, list):
        return _hashed(dict, [[unpack(key, other), unpack(item, other)] for key, item in content])
    if name == "int" and isinstance(content, str):
        return int(content, 16)
    if name == "bytes" and isinstance(content, str):
        return bytes.fromhex(content)
    if name == "complex" and isinstance(content, list) and [type(part) for part in content] == [float, float]:
        return complex(*content)
    if other is not None:
        return other(name, content)
    raise ValueError(f"no packed value: {name[:40]!r}")


def _hashed(kind: Callable[[Any], object], items: list[Any]) -> object:
    try:
        return kind(items)
    except TypeError as error:
        raise ValueError(str(error)) from None
