"""Assignment of samples to ranks and rows."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_worker.models.config import ModelConfig
from rljob_worker.models.cost import pair_cost
from rljob_worker.trainer.dealing import FULL_ROW, Dealing, Plan, deal, plan_update
from rljob_worker.types import IntArray

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)
PAIR_COST = 36 * 4096 / 4.0e9
"""Pair cost of Qwen3-4B: 36 layers, query heads of 4096 elements together, 4.0e9 parameters."""
STEPS = {
    "256 x 2k, at most 8k": (256, 2000, 4, Dealing(9216, 4, pair_cost=PAIR_COST)),
    "256 x 2k, at most 28k": (256, 2000, 14, Dealing(32768, 4, pair_cost=PAIR_COST)),
    "256 x 600, at most 8k": (256, 600, 14, Dealing(9216, 8, pair_cost=PAIR_COST)),
    "512 x 2k, at most 8k": (512, 2000, 4, Dealing(9216, 8, pair_cost=PAIR_COST)),
    "128 x 4k, at most 16k": (128, 4000, 4, Dealing(18432, 8, pair_cost=PAIR_COST)),
}
"""Samples, mean response, longest / mean; prompts of 200."""


def log_normal(count: int, mean: int, ratio: float) -> IntArray:
    """Quantiles of a log-normal law with this mean and longest / mean, in an order that says nothing."""
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    low, high = 0.01, 6.0
    for _ in range(80):
        spread = (low + high) / 2
        values = np.exp(spread * normal)
        low, high = (spread, high) if values.max() / values.mean() < ratio else (low, spread)
    lengths = np.maximum(1, np.round(values / values.mean() * mean)).astype(np.int64)
    return np.random.default_rng(0).permutation(lengths)


@given(
    LENGTHS,
    st.integers(1, 5),
    st.integers(1, 200),
    st.integers(1, 3),
    st.sampled_from([0.0, 1e-3, 0.5]),
    st.booleans(),
)
@settings(max_examples=200)
def test_every_sample_once_bound_kept_and_ranks_agree(
    lengths: list[int], parts: int, bound: int, stages: int, pair: float, lockstep: bool
) -> None:
    array = np.array(lengths)
    dealing = Dealing(bound, parts, stages, lockstep, pair)
    plans = [plan_update(array, dealing, part) for part in range(parts)]
    assert sorted(np.concatenate([row for plan in plans for row in plan]).tolist()) == list(range(len(lengths)))
    assert len({len(plan) for plan in plans}) == 1
    for plan in plans:
        for row in plan:
            assert len(row) <= 1 or array[row].sum() <= bound
            assert (np.diff(array[row]) <= 0).all(), "neighbours of one length are one rectangle"
        work = [dealing.costs(array[row]).sum() for row in plan]
        assert work == sorted(work, reverse=True)


@given(LENGTHS, st.integers(1, 5))
def test_parts_differ_by_at_most_the_longest(lengths: list[int], parts: int) -> None:
    """The bound of Graham's rule."""
    costs = np.array(lengths, dtype=np.float64)
    loads = [costs[part].sum() for part in deal(costs, parts)]
    assert max(loads) - min(loads) <= costs.max()


@pytest.mark.parametrize("lockstep", [False, True], ids=["update", "row"])
@pytest.mark.parametrize("name", STEPS)
def test_ranks_lose_little_by_waiting(name: str, lockstep: bool) -> None:
    """The slowest rank's work against the mean of all: over the update, or at each row and added up."""
    count, mean, ratio, dealing = STEPS[name]
    dealing = replace(dealing, lockstep=lockstep)
    lengths = log_normal(count, mean, ratio) + 200
    ranks = range(dealing.parts)
    work = np.array([[dealing.costs(lengths[row]).sum() for row in plan_update(lengths, dealing, r)] for r in ranks])
    waited, most = (work.max(0).sum(), 1.05) if lockstep else (work.sum(1).max(), 1.02)
    lost = waited / (work.sum() / dealing.parts)
    assert lost <= most
    assert Plan(lengths, dealing.costs(lengths), dealing).imbalance == pytest.approx(lost)


def test_skewed_lengths_fill_few_rows() -> None:
    lengths = np.minimum(np.random.default_rng(0).geometric(1 / 65, 64), 256)
    rows = plan_update(lengths, Dealing(2048), 0)
    assert len(rows) == -(-int(lengths.sum()) // 2048)


def test_equal_lengths_fill_the_bound() -> None:
    rows = plan_update(np.full(96, 10), Dealing(320), 0)
    assert [len(row) for row in rows] == [32] * 3


@pytest.mark.parametrize(("last", "rows"), [(4, [[1, 0, 3, 2]]), (5, [[1, 2], [3, 0]])])
def test_one_row_is_all_samples_while_they_fit(last: int, rows: list[list[int]]) -> None:
    lengths = np.array([4, 6, 3, last])
    planned = plan_update(lengths, Dealing(17), 0)
    assert [row.tolist() for row in planned] == rows


def test_a_pipeline_gets_rows_for_its_stages_while_they_are_full() -> None:
    lengths = np.full(64, 1024)
    assert len(plan_update(lengths, Dealing(65536), 0)) == 1
    assert len(plan_update(lengths, Dealing(65536, stages=4), 0)) == 16
    assert len(plan_update(lengths[:16], Dealing(65536, stages=4), 0)) == 16 * 1024 // FULL_ROW


def test_a_pair_costs_as_attention_does() -> None:
    shape = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
    dense = pair_cost(ModelConfig.from_hf(shape | {"model_type": "qwen3", "tie_word_embeddings": True}))
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    assert dense == pytest.approx(2 * 64 / (2 * layer + 64))
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    mixture = pair_cost(ModelConfig.from_hf(shape | experts | {"model_type": "qwen3_moe"}))
    assert mixture == pytest.approx(2 * 64 / (2 * (layer + 8 * 64) + 64)), "two experts are as wide as the one MLP"
