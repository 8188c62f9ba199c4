"""Which part of a tensor goes to a parameter of an engine, and what that part's pieces have to do with it."""

from __future__ import annotations

import torch

from rljob_worker.weightsync.vllm_layout import Copy, Taken, View


def taken(source: torch.Tensor, shape: tuple[int, ...], target: torch.Tensor | None = None) -> Taken | None:
    target = torch.zeros(source.shape) if target is None else target
    return Taken.of([Copy("module", "weight", View.of(source), View.of(target))], shape)


def test_a_shard_of_rows_or_columns_is_taken_as_it_is() -> None:
    whole = torch.arange(48.0).view(8, 6)
    assert taken(whole, (8, 6)) == Taken(None, 0, 0)
    assert taken(whole[2:4], (8, 6)) == Taken(0, 2, 2)
    assert taken(whole[:, 3:], (8, 6)) == Taken(1, 3, 3)


def test_what_changes_its_shape_or_goes_to_several_places_is_not_taken_as_it_is() -> None:
    whole = torch.arange(36.0).view(6, 6)
    assert taken(whole.t(), (6, 6)) is None
    assert taken(whole[1:3, 1:3], (6, 6)) is None
    assert taken(whole, (6, 6), torch.zeros(36)) is None
    copy = Copy("module", "weight", View.of(whole), View.of(whole))
    assert Taken.of([copy, copy], (6, 6)) is None


def test_pieces_land_inside_of_what_is_taken_and_only_there() -> None:
    rows, target = Taken(0, 2, 4), torch.arange(24).view(4, 6)
    inside = rows.place_of(target, 0, 3, 2)
    assert inside is not None
    assert torch.equal(inside, target[1:3])
    assert rows.place_of(target, 0, 1, 2) is None
    assert rows.place_of(target, 0, 5, 2) is None
    assert rows.place_of(target, 1, 2, 2) is None
    assert rows.place_of(target, None, 0, 0) is None
    assert rows.misses(0, 0, 2)
    assert rows.misses(0, 6, 2)
    assert not rows.misses(0, 1, 2)
    assert not rows.misses(1, 0, 2)
    assert not rows.misses(None, 0, 0)


def test_all_of_a_tensor_has_room_for_each_piece() -> None:
    target = torch.arange(24).view(4, 6)
    everything = Taken(None, 0, 0)
    piece = everything.place_of(target, 1, 2, 3)
    assert piece is not None
    assert torch.equal(piece, target[:, 2:5])
    assert everything.place_of(target, None, 0, 0) is target
    assert not everything.misses(0, 0, 2)
