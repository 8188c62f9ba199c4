"""Distance of the trainer's log-probabilities from the engine's, also by the age of a token.

Sums over the tokens of a micro-batch, which add up over micro-batches and ranks; `finish_ages` makes means of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_DISTANCE = "train_rollout_logprob_abs_diff_age_"
_TOKENS = "tokens_of_age_"


def mismatch_metrics(old: Tensor, rollout: Tensor) -> dict[str, Tensor]:
    """Over all tokens; [...] float32 both, 0 outside the mask."""
    difference = old - rollout
    distance = difference.abs()
    return {
        "train_rollout_logprob_abs_diff": distance.sum(),
        "train_rollout_logprob_abs_diff_max": distance.max() if distance.numel() else distance.sum(),
        "mismatch_kl": (difference.exp() - 1 - difference).sum(),
    }


def mismatch_by_age(old: Tensor, rollout: Tensor, ages: Tensor, num_ages: int) -> dict[str, Tensor]:
    """Over the tokens of each age: what age 0 shows is trainer against engine, and what more shows, the updates since.

    Args:
        old: [T] float32, the trainer's log-probabilities before the step's first update, without gradient.
        rollout: [T] float32, the engine's, under the weights that sampled each token.
        ages: [T] int64 in [0, num_ages): updates between those weights and the trainer's.
        num_ages: how many ages there may be; the names depend on it alone.

    Returns:
        0-dim float32 each: for each age the summed distance, and how many tokens are of it.
    """
    of_age = ages == torch.arange(num_ages, device=ages.device).unsqueeze(-1)
    distances = torch.where(of_age, (old - rollout).abs(), 0.0).sum(-1)
    counts = of_age.sum(-1).float()
    by_age = {f"{_DISTANCE}{age}": distances[age] for age in range(num_ages)}
    return by_age | {f"{_TOKENS}{age}": counts[age] for age in range(num_ages)}


def finish_ages(reduced: dict[str, float]) -> dict[str, float]:
    """Reduced metrics, with means in the place of the sums of ages; without ages that no token has."""
    finished = {}
    for name, value in reduced.items():
        if name.startswith(_DISTANCE):
            count = reduced[_TOKENS + name.removeprefix(_DISTANCE)]
            if count:
                finished[name] = value / count
        elif not name.startswith(_TOKENS):
            finished[name] = value
    return finished
