from __future__ import annotations

from typing import Any

import numpy.typing as npt
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_worker.weightsync import shared_memory as module
from rljob_worker.weightsync.shared_memory import Filling, HostMemory, Landing
from rljob_worker.weightsync.slots import Move


def checksum(tensor: torch.Tensor) -> int:
    return Landing([Move(None, None, tensor)]).run()


def copy_with_checksum(source: torch.Tensor, target: torch.Tensor) -> int:
    return Filling([(source, target)], torch.empty(0, dtype=torch.uint8)).run()


def cast_with_checksum(source: torch.Tensor, target: torch.Tensor, scratch: torch.Tensor) -> int:
    return Filling([(source, target)], scratch).run()


def copy_and_checksum(source: torch.Tensor, target: torch.Tensor) -> int:
    return Landing([Move(source, target, target)]).run()


SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3)


@given(
    shape=SHAPES,
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
    flip=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60)
def test_checksum_is_xxh3_of_the_row_major_bytes(
    shape: list[int], dtype: torch.dtype, flip: bool, data: st.DataObject
) -> None:
    tensor = torch.randint(0, 200, shape).to(dtype)
    view = tensor.transpose(0, -1) if flip else tensor
    expected = xxhash.xxh3_64_intdigest(bytes(view.flatten().clone().view(torch.uint8).tolist()))
    assert checksum(view) == expected
    target = torch.empty(tuple(view.shape) if not flip else tuple(reversed(view.shape)), dtype=dtype)
    target = target if not flip or view.dim() == 1 else torch.empty_strided(view.shape, view.stride(), dtype=dtype)
    for copy in (copy_with_checksum, copy_and_checksum):
        target.zero_()
        assert copy(view, target) == expected
        assert torch.equal(target, view)
    position = data.draw(st.integers(0, tensor.nbytes - 1))
    tensor.view(-1).view(torch.uint8)[position] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(view) != expected


@given(
    shape=st.lists(st.integers(0, 9), min_size=0, max_size=3),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float64]),
    flip=st.booleans(),
    narrow=st.booleans(),
    scratch=st.sampled_from([8, 16, 40, 2**19]),
)
@settings(max_examples=100)
def test_what_is_rounded_is_summed_as_it_is_sent(
    shape: list[int], dtype: torch.dtype, flip: bool, narrow: bool, scratch: int
) -> None:
    source = torch.randn(shape)
    if shape and flip:
        source = source.transpose(0, -1)
    wide = torch.zeros((*source.shape[:-1], source.shape[-1] + 3) if shape else ()).to(dtype)
    target = wide[..., 2:-1] if shape and narrow else torch.empty(source.shape, dtype=dtype)
    summed = cast_with_checksum(source, target, torch.empty(scratch, dtype=torch.uint8))
    assert torch.equal(target, source.to(dtype))
    assert summed == checksum(source.to(dtype))


@pytest.mark.parametrize("size", [2**15, 2**15 + 1, 2**18, 2**18 + 7, 2**20])
def test_slots_round_by_a_scratch_that_they_keep(size: int) -> None:
    slots, source = HostMemory.private(2 * size), torch.randn(size)
    target = slots.tensor(0, 0, torch.bfloat16, (size,))
    for _ in range(2):
        assert slots.filling([(source, target)]).run() == checksum(source.to(torch.bfloat16))
        assert torch.equal(target, source.to(torch.bfloat16))
        target.zero_()
    kept = slots._scratch
    assert kept is not None
    slots.filling([(source, target)]).run()
    assert slots._scratch is kept


def test_what_arrives_rounded_is_not_what_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_badly(write: npt.NDArray[Any], read: npt.NDArray[Any]) -> None:
        write[:] = read
        write.reshape(-1)[7] ^= 1

    monkeypatch.setattr(module.np, "copyto", copy_badly)
    source, target = torch.randn(64), torch.zeros(64, dtype=torch.bfloat16)
    assert cast_with_checksum(source, target, torch.empty(64, dtype=torch.uint8)) == checksum(source.bfloat16())
    assert checksum(target) != checksum(source.bfloat16())


@pytest.mark.parametrize("size", [0, 1, 2**20 - 1, 2**20, 3 * 2**20 + 5])
def test_chunks_make_no_difference(size: int) -> None:
    tensor = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    target = torch.zeros_like(tensor)
    assert copy_with_checksum(tensor, target) == checksum(tensor) == xxhash.xxh3_64_intdigest(tensor.numpy().tobytes())
    assert torch.equal(target, tensor)
    target.zero_()
    assert copy_and_checksum(tensor, target) == checksum(tensor)
    assert torch.equal(target, tensor)


def test_the_engine_sums_what_arrived_and_the_trainer_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_badly(write: npt.NDArray[Any], read: npt.NDArray[Any]) -> None:
        write[:] = read
        write.reshape(-1)[7] ^= 1

    monkeypatch.setattr(module.np, "copyto", copy_badly)
    source, target = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    assert copy_with_checksum(source, target) == checksum(source)
    arrived = copy_and_checksum(source, target)
    assert arrived != checksum(source)
    assert arrived == checksum(target)


@pytest.mark.parametrize("stride", [(7, 5), (1, 9)])
def test_one_element_of_odd_strides(stride: tuple[int, int]) -> None:
    tensor = torch.empty_strided((1, 1), stride, dtype=torch.bfloat16).fill_(1.5)
    assert checksum(tensor) == checksum(torch.tensor([1.5], dtype=torch.bfloat16))


def test_columns_of_a_large_matrix() -> None:
    matrix = torch.randn(3000, 600)
    columns = matrix.narrow(1, 100, 300)
    assert checksum(columns) == xxhash.xxh3_64_intdigest(columns.contiguous().numpy().tobytes())


def test_one_digest_is_over_pieces_in_their_order_on_both_sides() -> None:
    slots = HostMemory.private(2**16)
    sources = [torch.randn(7, 5).bfloat16(), torch.randn(3, 8).t(), torch.randn(4).bfloat16()]
    places = [slots.tensor(0, 512 * n, torch.bfloat16, tuple(source.shape)) for n, source in enumerate(sources)]
    filling = slots.filling(list(zip(sources, places, strict=True)))
    for _ in range(2):
        right = filling.run()
        assert right == xxhash.xxh3_64_intdigest(
            b"".join(source.bfloat16().contiguous().view(torch.int16).numpy().tobytes() for source in sources)
        )
        targets = [torch.empty_like(place) for place in places]
        wide = torch.empty(7, 5)
        moves = [Move(place, target, target) for place, target in zip(places, targets, strict=True)]
        partly = [Move(places[0], wide, None), Move(None, None, places[0]), *moves[1:]]
        assert slots.landing(moves).run() == slots.landing(partly).run() == right
        growing = slots.digest()
        for move in moves:
            growing.add(move)
            targets[0].zero_()
        assert growing.begun() == right
        assert slots.landing([moves[1], moves[0], moves[2]]).run() != right, "swapped"
        assert torch.equal(wide, places[0].float())
        for source in sources:
            source.add_(1)
