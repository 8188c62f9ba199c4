"""Replacing an object wherever it is."""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rljob_worker.trainer.references import replace_everywhere


class Thing:
    pass


class Slotted:
    __slots__ = ("own",)


@dataclass(frozen=True, slots=True)
class Frozen:
    own: Any


class Derived(Slotted):
    __slots__ = ()


def test_every_kind_of_place() -> None:
    old, new = Thing(), Thing()
    module = torch.nn.Linear(1, 1)
    module.own = old
    slotted, derived, frozen, plain = Slotted(), Derived(), Frozen(old), Thing()
    slotted.own = derived.own = plain.own = old  # type: ignore[attr-defined]
    items: list[Any] = [1, old, [old, old]]
    table: dict[str, Any] = {"a": old, "b": {"c": old}}

    def closure(held: Thing = Thing()) -> Thing:  # noqa: B008
        return captured

    captured = old
    del old
    pairs = [(items[1], new)]
    assert replace_everywhere(pairs) == 11
    assert items == [1, new, [new, new]]
    assert table == {"a": new, "b": {"c": new}}
    assert module.own is slotted.own is derived.own is frozen.own is plain.own is closure() is new  # type: ignore[attr-defined]


def test_two_at_once_do_not_mix() -> None:
    first, second = Thing(), Thing()
    items = [first, second, first]
    new = [Thing(), Thing()]
    pairs = [(first, new[0]), (second, new[1])]
    del first, second
    replace_everywhere(pairs)
    assert items == [new[0], new[1], new[0]]


@pytest.mark.parametrize(
    "hold", [lambda thing: (thing,), lambda thing: {thing}, functools.partial(functools.partial, print)]
)
def test_a_place_that_cannot_be_changed_is_refused(hold: Any) -> None:
    old = Thing()
    holder = hold(old)
    pairs = [(old, Thing())]
    del old
    with pytest.raises(RuntimeError, match=r"is held by a (tuple|set|partial)"):
        replace_everywhere(pairs)
    assert holder is not None


def test_places_that_the_collector_does_not_know() -> None:
    group = _pg()
    known: list[Any] = [{"deep": group}, {"deeper": {"deepest": group}}]
    # A collection forgets dictionaries that hold nothing it knows.
    gc.collect()
    assert not gc.is_tracked(known[0])
    new = Thing()
    pairs = [(group, new)]
    del group
    assert replace_everywhere(pairs) == 2
    assert known == [{"deep": new}, {"deeper": {"deepest": new}}]
    assert pairs == []


def test_what_a_running_function_holds_is_found() -> None:
    old = Thing()
    pairs = [(old, Thing())]
    with pytest.raises(RuntimeError, match="held by a running function or by compiled code"):
        replace_everywhere(pairs)
    assert old is not None


def _pg() -> Any:
    """An object of a compiled class, which the collector does not know."""
    return torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 1)
