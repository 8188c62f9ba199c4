"""Finding every place that refers to an object, and putting another object there."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

Pair = tuple[object, object]
Level = dict[int, tuple[object, set[int]]]
"""Holders by id, each with the numbers of what they lead to."""
_DEPTH = 4
"""Containers in one another, beyond which the owner is not looked for."""


class References:
    """Puts objects in the place of others, wherever those are; most often where it found the ones before.

    To search is to read the whole heap, several times. So what held something once is looked at first the next time,
    and there is a search only where an old object is still alive after that.

    Args:
        owners: packages whose modules, functions and objects may hold an old object, or a container that does.
    """

    def __init__(self, owners: Sequence[str]) -> None:
        self._owners = owners
        self._holders: list[object] = []

    def replace(self, pairs: list[Pair]) -> int:
        """Put the second of each pair wherever the first is referred to, so that nothing keeps the first one alive.

        Looks through dictionaries, lists, attributes and closures.

        Args:
            pairs: old and new objects; emptied. The old ones can be referred to weakly, and no caller holds them.

        Returns:
            The number of places.

        Raises:
            RuntimeError: an old object is held by something of another package, or in a place that cannot be changed;
                names it. In the first case nothing has been changed unless the holder is one that the collector does
                not know, or one of those that held something before.
        """
        watched = [(weakref.ref(old), new) for old, new in pairs]
        new = {id(old): replacement for old, replacement in pairs}
        changes = [(holder, _replace_in(holder, new)) for holder in self._holders]
        self._holders = [holder for holder, changed in changes if changed]
        places = sum(changed for _, changed in changes)
        pairs.clear()
        left = _alive(watched)
        if left:
            with _nothing_frozen():
                places += self._search(left, watched)
        if any(old() is not None for old, _ in watched):
            raise RuntimeError("an object that is to be replaced is held by a running function or by compiled code")
        return places

    def _search(self, pairs: list[Pair], watched: Sequence[tuple[weakref.ref[object], object]]) -> int:
        holders = [(holder, holder) for holder in gc.get_referrers(*(old for old, _ in pairs))]
        places = self._replace(pairs, holders)
        pairs.clear()
        holders.clear()
        left = _alive(watched)
        if left:
            # The collector does not know dictionaries and tuples that hold nothing it knows, and it does not know
            # objects of compiled classes.
            places += self._replace(left, _unknown_holders({id(old) for old, _ in left}))
            left.clear()
        return places

    def _replace(self, pairs: list[Pair], holders: list[Pair]) -> int:
        """Replace in holders, each given with a tracked object that leads to it."""
        new = {id(old): replacement for old, replacement in pairs}
        ours = {id(pairs), *map(id, pairs)}
        holders[:] = [(h, known) for h, known in holders if id(h) not in ours and not isinstance(h, types.FrameType)]
        _check_owners(holders, self._owners)
        places = 0
        for holder, _ in holders:
            changed = _replace_in(holder, new)
            if not changed:
                raise RuntimeError(f"an object that is to be replaced is held by a {type(holder).__qualname__}")
            places += changed
            if not _is_of_a_pass(holder):
                self._holders.append(holder)
        return places


@contextmanager
def _nothing_frozen() -> Iterator[None]:
    """The collector shows no frozen object, and does not say to what those refer."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.collect()
            gc.freeze()


def _is_of_a_pass(holder: object) -> bool:
    """Whether it holds a torch.autograd.Function's state for the backward pass,
    which would be kept alive."""
    return hasattr(type(holder), "_forward_cls")


def _alive(watched: Iterable[tuple[weakref.ref[object], object]]) -> list[Pair]:
    return [(old(), new) for old, new in watched if old() is not None]


def _check_owners(holders: list[Pair], allowed: Sequence[str]) -> None:
    found = _modules_of([known for _, known in holders])
    for (holder, _), modules in zip(holders, found, strict=True):
        if not any(module == name or module.startswith(f"{name}.") for module in modules for name in allowed):
            whose = ", ".join(sorted(modules)) or "nothing that is known"
            raise RuntimeError(
                f"an object that is to be replaced is held by a {type(holder).__qualname__} of {whose}; only "
                f"{', '.join(allowed)} may hold one"
            )


def _modules_of(holders: list[object]) -> list[set[str]]:
    """Names of the modules that each holder belongs to, or the nearest that hold it."""
    found: list[set[str]] = [set() for _ in holders]
    level: Level = {}
    for number, holder in enumerate(holders):
        _sort_in(holder, {number}, found, level)
    for _ in range(_DEPTH):
        # Each level is a reading of the whole heap: only for what is nobody's yet.
        below = {key: entry for key, entry in level.items() if not all(found[number] for number in entry[1])}
        if not below:
            break
        level = {}
        children = [child for child, _ in below.values()]
        own = {id(children), *map(id, below.values())}
        for referrer in gc.get_referrers(*children):
            if id(referrer) in own or isinstance(referrer, types.FrameType):
                continue
            for child in gc.get_referents(referrer):
                if id(child) in below:
                    _sort_in(referrer, below[id(child)][1], found, level)
    return found


def _sort_in(holder: object, numbers: set[int], found: list[set[str]], level: Level) -> None:
    """Note whose the holder is, or look for what holds it on the next level."""
    module = _module_of(holder)
    if module:
        for number in numbers:
            found[number].add(module)
    else:
        level.setdefault(id(holder), (holder, set()))[1].update(numbers)


def _module_of(holder: object) -> str:
    """The module that an object belongs to; empty for a container that says nothing about it."""
    if type(holder) is dict:
        name = holder.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        return str(name) if module is not None and vars(module) is holder else ""
    if type(holder) in (list, tuple, set, frozenset, types.CellType):
        return ""
    if isinstance(holder, types.ModuleType):
        return holder.__name__
    if isinstance(holder, types.FunctionType | type):
        return holder.__module__
    # What a torch.autograd.Function keeps for its backward pass is an instance of a class that torch makes of it.
    kind = type(holder)
    return str(getattr(kind, "_forward_cls", kind).__module__)


def _unknown_holders(wanted: set[int]) -> list[Pair]:
    """Dictionaries and tuples that the collector does not track and that hold a wanted object; reads the whole heap.

    Each comes with an object that the collector tracks and that leads to it.
    """
    seen: set[int] = set()
    holders: list[Pair] = []
    waiting = [(child, known) for known in gc.get_objects() for child in gc.get_referents(known) if _unknown(child)]
    while waiting:
        holder, known = waiting.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        values = list(holder.values()) if isinstance(holder, dict) else holder
        if any(id(value) in wanted for value in values):
            holders.append((holder, known))
        waiting += [(value, known) for value in values if _unknown(value)]
    return holders


def _unknown(value: object) -> bool:
    return type(value) in (dict, tuple) and not gc.is_tracked(value)


def _replace_in(holder: object, new: Mapping[int, object]) -> int:
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
            content = _content(holder)
            found = [("cell_contents", content)] if id(content) in new else []
            if found:
                holder.cell_contents = new[id(content)]
        case _:
            found = [(name, value) for name, value in _attributes(holder) if id(value) in new]
            for name, value in found:
                # Frozen dataclasses and modules refuse or watch plain assignment.
                object.__setattr__(holder, name, new[id(value)])
    return len(found)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # It is empty by now.


def _attributes(holder: object) -> list[tuple[str, object]]:
    slots = [name for kind in type(holder).__mro__ for name in _slots(kind) if hasattr(holder, name)]
    return [*getattr(holder, "__dict__", {}).items(), *((name, getattr(holder, name)) for name in slots)]


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
