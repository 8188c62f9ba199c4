"""AdamW with its moments on the host: the bits of one that has them at hand, two buckets at a time on the device."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.brought import Brought
from torch import Tensor

from rljob_api.spec import OptimizerSpec
from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.trainer import state_buckets
from rljob_worker.trainer.fsdp.optimizer import ShardedAdamW

SHAPES = {"a": (50, 10), "b": (50, 10), "norm": (30,), "c": (90, 10), "d": (20, 10), "bias": (10,)}
BUCKET = 1000
"""Elements; a + b, norm + c, d + bias."""


def updated(*, on_host: bool) -> tuple[dict[str, Tensor], list[Tensor], int]:
    """Rows and state after three updates, and the bytes that were brought at once."""
    generator = torch.Generator().manual_seed(1)
    rows = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    made = ShardedAdamW(
        rows, OptimizerSpec(weightDecay=0.1), nullcontext, overlap=CpuDevice().overlap if on_host else None
    )
    with Brought() as brought:
        for _ in range(3):
            made.step({name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}, 1e-2)
    return rows, [*made.flats, made.steps], brought.peak


def test_two_buckets_at_a_time_and_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_buckets, "BUCKET_ELEMENTS", BUCKET)
    rows, state, peak = updated(on_host=True)
    expected, expected_state, without = updated(on_host=False)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in rows.items())
    assert all(torch.equal(a, b) for a, b in zip(state, expected_state, strict=True))
    assert without == 0
    # Two moments, and a number of updates for each of a bucket's two parameters: a + b or d + bias beside norm + c.
    assert peak == (2 * (BUCKET + 930) + 2 * 2) * 4
