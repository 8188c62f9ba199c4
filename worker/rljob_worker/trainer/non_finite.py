"""Sources of values that are not finite, for the error that names them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_worker.trainer.batches import Update
from rljob_worker.trainer.objective import Loss


def bad_micro_batches(update: Update, loss: Loss, rows: Sequence[Tensor]) -> list[str]:
    """The micro-batches of this rank whose loss is not finite.

    Args:
        update: the update that was computed.
        loss: what computed it.
        rows: its metrics [M] of each micro-batch; empty where this rank computes no loss.
    """
    if not rows:
        return []
    values = torch.stack(list(rows))[:, loss.names.index("loss")]
    return [
        f"loss of micro-batch {i} is {values[i].item()} (samples {update.micro_batches[i].samples.tolist()})"
        for i in range(len(values))
        if not math.isfinite(values[i].item())
    ]


def findings_of_all_ranks(found: list[str], world_size: int) -> str:
    """The first findings of all ranks, with their ranks; collective."""
    everyone = [found]
    if world_size > 1:
        everyone = [[] for _ in range(world_size)]
        dist.all_gather_object(everyone, found)
    text = "; ".join(
        f"rank {number}: {', '.join(items[:3])}{f' and {len(items) - 3} more' if len(items) > 3 else ''}"
        for number, items in enumerate(everyone)
        if items
    )
    return f"not finite: {text or 'the sum of finite values'}"
