"""Tensors that land in a region: factories, modules, optimizer state."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rljob_worker.memory.arena import Arena, Tag
from rljob_worker.memory.states import TransitionRefused

MIB = 1024 * 1024
OUTSIDE = torch.arange(12.0).reshape(3, 4)

FACTORIES: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(3, 4).fill_(2),
    "zeros": lambda: torch.zeros(3, 4, dtype=torch.bfloat16),
    "ones": lambda: torch.ones(3, dtype=torch.int32),
    "full": lambda: torch.full((2, 5), 3.5),
    "zeros_like": lambda: torch.zeros_like(OUTSIDE.t(), memory_format=torch.preserve_format),
    "ones_like": lambda: torch.ones_like(OUTSIDE, dtype=torch.float64),
    "full_like": lambda: torch.full_like(OUTSIDE, 9),
    "empty_like": lambda: torch.empty_like(OUTSIDE).zero_(),
    "new_zeros": lambda: OUTSIDE.new_zeros(4, 2),
    "new_ones": lambda: OUTSIDE.new_ones(4, 2),
    "new_full": lambda: OUTSIDE.new_full((4, 2), 7),
    "new_empty": lambda: OUTSIDE.new_empty(2).fill_(1),
    "new_tensor": lambda: OUTSIDE.new_tensor([1.0, 2.0]),
    "empty_strided": lambda: torch.empty_strided((2, 3), (1, 4)).fill_(4),
    "tensor": lambda: torch.tensor([1.5, 2.5]),
    "scalar": lambda: torch.tensor(0.0),
    "arange": lambda: torch.arange(7),
    "clone": lambda: OUTSIDE.clone(),
    "clone transposed": lambda: OUTSIDE.t().clone(),
    "clone expanded": lambda: OUTSIDE[:1].expand(5, 4).clone(),
    "channels last": lambda: torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
    "float": lambda: OUTSIDE.double().float(),
    "to": lambda: OUTSIDE.to(torch.bfloat16),
    "contiguous": lambda: OUTSIDE.t().contiguous(),
    "cat": lambda: torch.cat([OUTSIDE, OUTSIDE]),
    "arithmetic": lambda: OUTSIDE * 2 + 1,
}


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(256 * MIB)


@pytest.mark.parametrize("name", FACTORIES)
def test_factory_lands_in_the_arena_with_the_same_result(arena: Arena, name: str) -> None:
    expected = FACTORIES[name]()
    # A block that was used before: zeros must not rely on fresh pages.
    arena.allocate((1024,)).fill_(-1)
    with arena.region("backup"):
        made = FACTORIES[name]()
    assert arena.tag_of(made) is Tag.BACKUP
    assert not arena.contains(expected)
    assert torch.equal(made, expected)
    assert (made.dtype, made.stride()) == (expected.dtype, expected.stride())


def test_random_numbers_are_the_same_as_outside(arena: Arena) -> None:
    torch.manual_seed(3)
    expected = torch.randn(100), torch.nn.Linear(5, 6).weight
    torch.manual_seed(3)
    with arena.region("backup"):
        made = torch.randn(100), torch.nn.Linear(5, 6).weight
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    assert all(arena.contains(tensor) for tensor in made)


def test_what_is_not_new_stays_where_it_is(arena: Arena) -> None:
    array = np.ones(4, dtype=np.float32)
    with arena.region("backup"):
        view = OUTSIDE.view(-1)[2:]
        in_place = OUTSIDE.mul_(1)
        shared = torch.from_numpy(array)
        empty = torch.empty(0)
        meta = torch.empty(3, device="meta")
        meta_copy = torch.empty_like(meta)
    assert not any(arena.contains(tensor) for tensor in (view, in_place, shared, empty, meta, meta_copy))
    array[0] = 5
    assert shared[0] == 5
    assert view.data_ptr() == OUTSIDE.data_ptr() + 8


def test_regions_nest_and_end(arena: Arena) -> None:
    with arena.region("backup"):
        with arena.region("discard"):
            inner = torch.zeros(3)
        outer = torch.zeros(3)
    after = torch.zeros(3)
    assert (arena.tag_of(inner), arena.tag_of(outer), arena.tag_of(after)) == (Tag.DISCARD, Tag.BACKUP, None)


def test_pause_is_refused_inside_a_region() -> None:
    arena = Arena(64 * MIB)
    with arena.region("backup"), pytest.raises(TransitionRefused, match="1 regions"):
        arena.pause()
    assert not arena.paused
    with pytest.raises(ValueError, match="keep"), arena.region("keep"):
        pass
    with pytest.raises(RuntimeError, match="inside"), arena.region("backup"):
        raise RuntimeError("inside")
    assert not arena.contains(torch.zeros(3))
    arena.pause()
    arena.resume()


def test_module_and_adam_train_asleep_and_awake_like_ordinary_ones() -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
        return model, torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().sum().backward()
        optimizer.step()

    reference, reference_optimizer = build()
    arena = Arena(64 * MIB)
    with arena.region("backup"):
        model, optimizer = build()
    for seed in range(4):
        step(reference, reference_optimizer, seed)
        if seed == 0:
            with arena.region("backup"):
                step(model, optimizer, seed)
        else:
            step(model, optimizer, seed)
        arena.pause()
        assert arena.resident_bytes() == 0
        asleep = [arena.backup_view(parameter) for parameter in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(asleep, reference.parameters(), strict=True))
        arena.resume()
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert len(states) == 12
    assert all(arena.contains(tensor) for tensor in (*model.parameters(), *states))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_deepcopy_and_pickle_of_an_arena_tensor_are_ordinary(arena: Arena) -> None:
    import copy

    tensor = arena.allocate((3,)).fill_(2)
    assert torch.equal(copy.deepcopy(tensor), tensor)
    assert not arena.contains(copy.deepcopy(tensor))
