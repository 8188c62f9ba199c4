"""Loss from ranks that wait for one another, by arithmetic: work of the slowest against the mean of all.

Responses of log-normal lengths and prompts of 200 tokens; work of Qwen3-4B, products and causal attention. Ranks that
exchange experts wait at each micro-batch, others at the end of the update. Beside it, what padded rectangles lost.

    python benchmarks/balance.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from statistics import NormalDist

import numpy as np
from figures import Figure, report
from padded_plan import padded_ranks

from rljob_worker.trainer.dealing import Dealing, plan_update
from rljob_worker.types import IntArray

PAIR_COST = 36 * 4096 / 4.0e9
"""36 layers, query heads of 4096 elements together, 4.0e9 parameters."""
CASES = (
    (256, 2000, 4, Dealing(9216, 4, pair_cost=PAIR_COST)),
    (256, 2000, 14, Dealing(32768, 4, pair_cost=PAIR_COST)),
    (256, 600, 14, Dealing(9216, 8, pair_cost=PAIR_COST)),
    (512, 2000, 4, Dealing(9216, 8, pair_cost=PAIR_COST)),
    (128, 4000, 4, Dealing(18432, 8, pair_cost=PAIR_COST)),
)
"""Samples, mean response, longest / mean."""
PROMPT = 200
AT_EACH_ROW, AT_THE_UPDATE = 1.05, 1.02


def log_normal(count: int, mean: int, ratio: float) -> IntArray:
    """Quantiles of a log-normal law with this mean and longest / mean."""
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    low, high = 0.01, 6.0
    for _ in range(80):
        spread = (low + high) / 2
        values = np.exp(spread * normal)
        low, high = (spread, high) if values.max() / values.mean() < ratio else (low, spread)
    lengths = np.maximum(1, np.round(values / values.mean() * mean)).astype(np.int64)
    return np.random.default_rng(0).permutation(lengths)


def waits(lengths: IntArray, dealing: Dealing) -> tuple[float, float, int]:
    """(at each row, at the update's end, rows)."""
    work = np.array(
        [
            [dealing.costs(lengths[row]).sum() for row in plan_update(lengths, dealing, part)]
            for part in range(dealing.parts)
        ]
    )
    return *_losses(work), work.shape[1]


def padded_waits(lengths: IntArray, dealing: Dealing) -> tuple[float, float, int]:
    """The same of padded rectangles, whose padding is computed too, against the work of the samples alone."""
    work = np.array(
        [
            [len(group) * float(dealing.costs(lengths[group[:1]]).sum()) for group in groups]
            for groups in padded_ranks(lengths, dealing.parts, dealing.max_tokens)
        ]
    )
    excess = work.sum() / dealing.costs(lengths).sum()
    row, update = _losses(work)
    return row * excess, update * excess, work.shape[1]


def _losses(work: np.ndarray) -> tuple[float, float]:
    mean = work.sum() / len(work)
    return float(work.max(axis=0).sum() / mean), float(work.sum(axis=1).max() / mean)


def main() -> int:
    figures = []
    for count, mean, ratio, dealing in CASES:
        lengths = log_normal(count, mean, ratio) + PROMPT
        each, _, rows = waits(lengths, replace(dealing, lockstep=True))
        _, update, _ = waits(lengths, dealing)
        padded_each, padded_update, padded_rows = padded_waits(lengths, dealing)
        what = f"{count} x {mean} tokens, longest {ratio} times the mean, {dealing.parts} ranks"
        against = "mean work of all ranks"
        figures += [
            Figure(
                f"slowest rank at each of {rows} rows, {what}",
                against,
                each,
                AT_EACH_ROW,
                at_most=True,
                note=f"{padded_each:.2f} at each of {padded_rows} padded rectangles",
            ),
            Figure(
                f"slowest rank over an update, {what}",
                against,
                update,
                AT_THE_UPDATE,
                at_most=True,
                note=f"{padded_update:.2f} padded",
            ),
        ]
    return report(figures)


if __name__ == "__main__":
    sys.exit(main())
