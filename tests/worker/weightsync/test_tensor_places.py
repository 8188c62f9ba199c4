"""Part of a tensor that goes to a parameter of an engine, and its relation to that part's pieces."""

from __future__ import annotations

import torch

from rljob_worker.tensor_slice import Part
from rljob_worker.weightsync.places import Copy, View, part_of


def taken(source: torch.Tensor, shape: tuple[int, ...], target: torch.Tensor | None = None) -> Part | None:
    target = torch.zeros(source.shape) if target is None else target
    return part_of([Copy("module", "weight", View.of(source), View.of(target))], shape)


def test_a_shard_of_rows_or_columns_is_taken_as_it_is() -> None:
    whole = torch.arange(48.0).view(8, 6)
    assert taken(whole, (8, 6)) == Part()
    assert taken(whole[2:4], (8, 6)) == Part(0, 2, 2)
    assert taken(whole[:, 3:], (8, 6)) == Part(1, 3, 3)


def test_what_changes_its_shape_or_goes_to_several_places_is_not_taken_as_it_is() -> None:
    whole = torch.arange(36.0).view(6, 6)
    assert taken(whole.t(), (6, 6)) is None
    assert taken(whole[1:3, 1:3], (6, 6)) is None
    assert taken(whole, (6, 6), torch.zeros(36)) is None
    copy = Copy("module", "weight", View.of(whole), View.of(whole))
    assert part_of([copy, copy], (6, 6)) is None


def test_pieces_land_inside_of_what_is_taken_and_only_there() -> None:
    rows, target = Part(0, 2, 4), torch.arange(24).view(4, 6)
    inside = rows.place_of(Part(0, 3, 2), target)
    assert inside is not None
    assert torch.equal(inside, target[1:3])
    assert rows.place_of(Part(0, 1, 2), target) is None
    assert rows.place_of(Part(0, 5, 2), target) is None
    assert rows.place_of(Part(1, 2, 2), target) is None
    assert rows.place_of(Part(None, 0, 0), target) is None
    assert rows.misses(Part(0, 0, 2))
    assert rows.misses(Part(0, 6, 2))
    assert not rows.misses(Part(0, 1, 2))
    assert not rows.misses(Part(1, 0, 2))
    assert not rows.misses(Part(None, 0, 0))


def test_all_of_a_tensor_has_room_for_each_piece() -> None:
    target = torch.arange(24).view(4, 6)
    everything = Part()
    piece = everything.place_of(Part(1, 2, 3), target)
    assert piece is not None
    assert torch.equal(piece, target[:, 2:5])
    assert everything.place_of(Part(None, 0, 0), target) is target
    assert not everything.misses(Part(0, 0, 2))
