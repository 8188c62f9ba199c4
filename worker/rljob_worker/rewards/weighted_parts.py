"""A reward as the functions that it is made of, and their scores as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rljob_api.rewards import part_name
from rljob_api.spec import RewardSpec
from rljob_worker.types import RewardResult


@dataclass(frozen=True, slots=True)
class Part:
    """One function of a reward."""

    name: str | None
    """Name in records; None where it is the whole reward."""
    place: str
    """Below the reward in the manifest: empty, or `.parts[0]`."""
    weight: float
    reward: RewardSpec
    """The reward with this function alone."""
    rows: Sequence[str] | None = None
    """Values of the reward's column whose rows it scores; None: all rows."""


def parts_of(reward: RewardSpec) -> list[Part]:
    """Its functions, in the manifest's order."""
    if reward.parts is None:
        return [Part(None, "", 1.0, reward)]
    return [
        Part(
            part_name(part),
            f".parts[{index}]",
            part.weight,
            reward.model_copy(
                update={
                    "name": part.name, "python": part.python, "batch": part.batch, "args": part.args, "parts": None,
                    "signature": part.signature, "by": None,
                }
            ),
            part.rows,
        )
        for index, part in enumerate(reward.parts)
    ]  # fmt: skip


def join(parts: Sequence[Part], results: Sequence[RewardResult]) -> RewardResult:
    """One response's result from those of its reward's parts.

    The score is the sum of theirs times their weights. Recorded are each part's own score by its name, and what it
    reported beside it as `name.reported`. Where a part failed, its error and `errorScore` are the whole's.
    """
    if parts[0].name is None:
        return results[0]
    recorded: dict[str, float] = {}
    notes: dict[str, str] = {}
    if all(result.absent for result in results):
        return RewardResult(parts[0].reward.error_score, error="each part returned None, which is no score")
    for part, result in zip(parts, results):
        if result.absent:
            continue
        if result.error is not None:
            return RewardResult(part.reward.error_score, {}, f"{part.name}: {result.error}")
        recorded[str(part.name)] = result.score
        recorded |= {f"{part.name}.{name}": value for name, value in result.parts.items()}
        notes |= result.notes
    score = math.fsum(part.weight * result.score for part, result in zip(parts, results))
    return RewardResult(score, recorded, notes=notes)
