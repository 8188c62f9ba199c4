"""Replacing an object wherever it is."""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rljob_worker.upstream.references import References


class Thing:
    def __init__(self, held: Any = None) -> None:
        self.held = held


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
    plain.items = items = [1, old, [old, old]]  # type: ignore[attr-defined]
    plain.table = table = {"a": old, "b": {"c": old}}  # type: ignore[attr-defined]

    def closure(held: Thing = Thing()) -> Thing:  # noqa: B008
        return captured

    captured = old
    del old
    pairs = [(items[1], new)]
    assert References([__name__, "torch.nn"]).replace(pairs) == 11
    assert items == [1, new, [new, new]]
    assert table == {"a": new, "b": {"c": new}}
    assert module.own is slotted.own is derived.own is frozen.own is plain.own is closure() is new  # type: ignore[attr-defined]


def test_two_at_once_do_not_mix() -> None:
    first, second = Thing(), Thing()
    owner = Thing()
    owner.items = items = [first, second, first]  # type: ignore[attr-defined]
    new = [Thing(), Thing()]
    pairs = [(first, new[0]), (second, new[1])]
    del first, second
    References([__name__]).replace(pairs)
    assert items == [new[0], new[1], new[0]]


@pytest.mark.parametrize(
    "hold", [lambda thing: (thing,), lambda thing: {thing}, functools.partial(functools.partial, print)]
)
def test_a_place_that_cannot_be_changed_is_refused(hold: Any) -> None:
    old = Thing()
    holder = Thing()
    holder.held = hold(old)  # type: ignore[attr-defined]
    pairs = [(old, Thing())]
    del old
    with pytest.raises(RuntimeError, match=r"is held by a (tuple|set|partial)"):
        References([__name__]).replace(pairs)
    assert holder is not None


def test_places_that_the_collector_does_not_know() -> None:
    group = _pg()
    owner = Thing()
    owner.known = known = [{"deep": group}, {"deeper": {"deepest": group}}]  # type: ignore[attr-defined]
    # A collection forgets dictionaries that hold nothing it knows.
    gc.collect()
    assert not gc.is_tracked(known[0])
    new = Thing()
    pairs = [(group, new)]
    del group
    assert References([__name__]).replace(pairs) == 2
    assert known == [{"deep": new}, {"deeper": {"deepest": new}}]
    assert pairs == []


def test_what_a_running_function_holds_is_found() -> None:
    old = Thing()
    pairs = [(old, Thing())]
    with pytest.raises(RuntimeError, match="held by a running function or by compiled code"):
        References([__name__]).replace(pairs)
    assert old is not None


@pytest.mark.parametrize("keep", [Thing, lambda thing: [[thing]], lambda thing: {"a": {"b": thing}}])
def test_what_another_package_holds_is_refused_and_left(keep: Any) -> None:
    old = Thing()
    holder = Thing()
    holder.held = keep(old)  # type: ignore[attr-defined]
    before = repr(holder.held)  # type: ignore[attr-defined]
    pairs = [(old, Thing())]
    del old
    with pytest.raises(RuntimeError, match=rf"is held by a (Thing|list|dict) of {__name__}; only megatron, torch may"):
        References(["megatron", "torch"]).replace(pairs)
    assert repr(holder.held) == before  # type: ignore[attr-defined]


def test_what_an_autograd_function_keeps_belongs_to_the_functions_package() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, thing: Thing) -> torch.Tensor:
            ctx.thing = thing
            return value * 2

    old, new = Thing(), Thing()
    result = Doubled.apply(torch.ones(1, requires_grad=True), old)  # type: ignore[no-untyped-call]
    pairs = [(old, new)]
    del old
    References([__name__]).replace(pairs)
    assert result.grad_fn.thing is new


def test_the_second_time_there_is_no_search_but_for_what_is_held_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = Thing(), Thing(), Thing()
    owner = Thing()
    owner.items, owner.cell = [first], _keeping(first).__closure__  # type: ignore[attr-defined]
    searches: list[int] = []
    references, thaw = References([__name__]), gc.unfreeze
    monkeypatch.setattr(gc, "unfreeze", lambda: (searches.append(1), thaw()))
    pairs: list[tuple[object, object]] = [(owner.items[0], second)]  # type: ignore[attr-defined]
    del first
    assert references.replace(pairs) == 2
    assert searches
    searches.clear()
    pairs = [(second, third)]
    del second
    assert references.replace(pairs) == 2
    assert not searches
    owner.later = {"a": third}  # type: ignore[attr-defined]
    pairs = [(third, fourth := Thing())]
    del third
    assert references.replace(pairs) == 3
    assert searches
    assert owner.later == {"a": fourth}  # type: ignore[attr-defined]
    assert owner.items == [owner.cell[0].cell_contents] == [fourth]  # type: ignore[attr-defined]


def test_what_held_one_before_and_holds_another_thing_now_is_left() -> None:
    old, new = Thing(), Thing()
    owner, emptied = Thing(old), Thing(old)
    references = References([__name__])
    pairs: list[tuple[object, object]] = [(owner.held, new)]
    del old
    assert references.replace(pairs) == 2
    emptied.held = "another"
    pairs = [(new, newest := Thing())]
    del new
    assert references.replace(pairs) == 1
    assert (owner.held, emptied.held) == (newest, "another")


def test_frozen_objects_are_searched_and_frozen_again() -> None:
    old, new = Thing(), Thing()
    owner = Thing([old])
    gc.freeze()
    try:
        pairs: list[tuple[object, object]] = [(old, new)]
        del old
        assert References([__name__]).replace(pairs) == 1
        assert owner.held == [new]
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_what_nothing_holds_that_is_known_is_refused() -> None:
    old = Thing()
    held = [old]
    pairs = [(old, Thing())]
    del old
    with pytest.raises(RuntimeError, match="is held by a list of nothing that is known; only megatron may hold one"):
        References(["megatron"]).replace(pairs)
    assert isinstance(held[0], Thing)


def _keeping(thing: Thing) -> Any:
    return lambda: thing


def _pg() -> Any:
    """An object of a compiled class, which the collector does not know."""
    return torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 1)
