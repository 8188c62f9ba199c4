"""A context-parallel rank's tokens of a row: an even cut, wherever in it samples begin."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rljob_worker.trainer.batches import MicroBatch


@dataclass(frozen=True, slots=True)
class RowShare:
    """One of the equal parts of a row's tokens."""

    inputs: MicroBatch
    """`input_ids`, `position_ids`, `experts`, `rows`, `labels` and `teacher` are those of the part, `rows` counted from
    its beginning; all else, the bounds too, is the whole row's."""
    places: Tensor
    """[m] int64, which of the row's n response tokens the part predicts, in the order of `inputs.rows`."""
    count: int
    """n."""

    def to(self, device: torch.device) -> RowShare:
        """The same with its tensors on `device`."""
        return replace(self, inputs=self.inputs.to(device), places=self.places.to(device))


def share_of(row: MicroBatch, part: int, parts: int) -> RowShare:
    """Part `part` of a row whose length is a multiple of `parts`; on the host, where counting waits for nothing.

    Raises:
        ValueError: the length is none.
    """
    count = len(row.rows)
    if parts == 1:
        return RowShare(row, torch.arange(count), count)
    length, left = divmod(row.input_ids.shape[1], parts)
    if left:
        raise ValueError(f"{row.input_ids.shape[1]} tokens are not {parts} equal parts: pad the row")
    tokens = slice(part * length, (part + 1) * length)
    places = torch.nonzero((row.rows >= tokens.start) & (row.rows < tokens.stop)).squeeze(1)
    inputs = replace(
        row,
        input_ids=row.input_ids[:, tokens],
        position_ids=row.position_ids[:, tokens],
        rows=row.rows[places] - tokens.start,
        labels=row.labels[places],
        teacher=None if row.teacher is None else row.teacher[places],
        experts=None if row.experts is None else row.experts[tokens],
    )
    return RowShare(inputs, places, count)
