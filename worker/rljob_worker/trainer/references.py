"""Finding every place that refers to an object, and putting another object there."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def replace_everywhere(pairs: list[tuple[Any, Any]]) -> int:
    """Put the second of each pair wherever the first is referred to, so that nothing keeps the first one alive.

    Looks through dictionaries, lists, attributes and closures.

    Args:
        pairs: old and new objects; emptied. The old ones can be referred to weakly, and no caller holds them.

    Returns:
        The number of places.

    Raises:
        RuntimeError: an old object is in a place that cannot be changed; some places have been changed then.
    """
    watched = [(weakref.ref(old), new) for old, new in pairs]
    places = _replace(pairs, gc.get_referrers(*(old for old, _ in pairs)))
    pairs.clear()
    left = _alive(watched)
    if left:
        # The collector does not know dictionaries and tuples that hold nothing it knows, and it does not know objects
        # of compiled classes.
        places += _replace(left, _unknown_holders({id(old) for old, _ in left}))
        left.clear()
    if any(old() is not None for old, _ in watched):
        raise RuntimeError("an object that is to be replaced is held by a running function or by compiled code")
    return places


def _alive(watched: Iterable[tuple[weakref.ref[Any], Any]]) -> list[tuple[Any, Any]]:
    return [(old(), new) for old, new in watched if old() is not None]


def _replace(pairs: list[tuple[Any, Any]], holders: Iterable[Any]) -> int:
    new = {id(old): replacement for old, replacement in pairs}
    ours = {id(pairs), *map(id, pairs)}
    places = 0
    for holder in holders:
        if id(holder) in ours or isinstance(holder, types.FrameType):
            continue
        changed = _replace_in(holder, new)
        if not changed:
            raise RuntimeError(f"an object that is to be replaced is held by a {type(holder).__qualname__}")
        places += changed
    return places


def _unknown_holders(wanted: set[int]) -> Iterator[Any]:
    """Dictionaries and tuples that the collector does not know and that hold a wanted object; reads the whole heap."""
    seen: set[int] = set()
    waiting = [child for known in gc.get_objects() for child in gc.get_referents(known) if _unknown(child)]
    while waiting:
        holder = waiting.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        values = list(holder.values()) if isinstance(holder, dict) else holder
        if any(id(value) in wanted for value in values):
            yield holder
        waiting += [value for value in values if _unknown(value)]


def _unknown(value: Any) -> bool:
    return type(value) in (dict, tuple) and not gc.is_tracked(value)


def _replace_in(holder: Any, new: Mapping[int, Any]) -> int:
    match holder:
        case dict():
            found = [(key, value) for key, value in holder.items() if id(value) in new]
            for key, value in found:
                holder[key] = new[id(value)]
        case list():
            found = [(index, value) for index, value in enumerate(holder) if id(value) in new]
            for index, value in found:
                holder[index] = new[id(value)]
        case types.CellType():
            found = [("cell_contents", holder.cell_contents)]
            holder.cell_contents = new[id(holder.cell_contents)]
        case _:
            found = [(name, value) for name, value in _attributes(holder) if id(value) in new]
            for name, value in found:
                # Frozen dataclasses and modules refuse or watch plain assignment.
                object.__setattr__(holder, name, new[id(value)])
    return len(found)


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    slots = [name for kind in type(holder).__mro__ for name in _slots(kind) if hasattr(holder, name)]
    return [*getattr(holder, "__dict__", {}).items(), *((name, getattr(holder, name)) for name in slots)]


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
