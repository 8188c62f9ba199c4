"""The mismatch of trainer and engine by the age of a token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rljob_worker.algorithms import finish_metrics
from rljob_worker.algorithms.mismatch import mismatch_by_age
from rljob_worker.trainer.batches import PackedBatch
from rljob_worker.trainer.objective import mean_over_updates
from rljob_worker.types import TrainBatch


def reduced(parts: int) -> dict[str, float]:
    """Metrics of 5 tokens in micro-batches, some of which are empty, added up as over micro-batches and ranks."""
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0])
    rollout = torch.tensor([-1.5, -2.0, -1.0, -1.0, -1.25])
    ages = torch.tensor([0, 0, 2, 2, 0])
    total: dict[str, float] = {"tokens": 5.0, "loss": 1.0}
    for rows in np.array_split(np.arange(5), parts):
        sums = mismatch_by_age(old[rows], rollout[rows], ages[rows], num_ages=4)
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + value.item()
    return total


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_the_mean_is_over_the_tokens_of_an_age_however_they_are_split(parts: int) -> None:
    assert finish_metrics(reduced(parts)) == {
        "train/loss": 1.0,
        "train/train_rollout_logprob_abs_diff_age_0": 0.25,
        "train/train_rollout_logprob_abs_diff_age_2": 1.25,
    }


def test_a_log_probability_that_is_not_finite_is_seen_in_its_age_alone() -> None:
    bad = mismatch_by_age(torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([1, 0]), 2)
    assert [math.isnan(value) for value in bad.values()] == [False, True, False, False]


def test_the_mean_over_updates_leaves_out_those_without_tokens_of_an_age() -> None:
    name = "train_rollout_logprob_abs_diff_age_1"
    none = {"tokens": 3.0, "loss": 3.0, name: 0.0, "tokens_of_age_1": 0.0}
    some = {"tokens": 3.0, "loss": 1.0, name: 6.0, "tokens_of_age_1": 3.0}
    more = {"tokens": 3.0, "loss": 2.0, name: 4.0, "tokens_of_age_1": 1.0}
    assert mean_over_updates([none, some, more]) == {"train/loss": 2.0, f"train/{name}": 3.0}


def test_micro_batches_have_the_versions_of_their_tokens() -> None:
    batch = TrainBatch(
        tokens=np.arange(7),
        lengths=np.array([3, 4]),
        sampled=np.array([False, True, True, False, False, True, True]),
        rollout_log_probs=np.zeros(4, np.float32),
        advantages=np.zeros(4, np.float32),
        versions=np.array([4, 5, 6, 7]),
    )
    packed = PackedBatch(batch)
    assert packed.micro_batch(np.array([1, 0])).versions.tolist() == [6, 7, 4, 5]
    assert packed.micro_batch(np.array([], dtype=np.int64)).versions.tolist() == []
