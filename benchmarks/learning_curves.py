"""Learning of jobs after equally many trained samples, partial rollout and tail batching against none.

All sides are real jobs of one example (`examples/partial.yaml`, with and without its `rollout.partial`, and with
`rollout.tail`), of the same model, prompts and seed. What is compared is the mean reward on held-out prompts, which
all sides answer whole: a step's own reward says as much of which groups were complete as of what was learned. The
figure is the mean of a run's evaluations over that of the synchronous run's, as a mean over the seeds.

    python benchmarks/learning_curves.py [--seeds 1 2 3] [--steps N] [--lr RATE] [--sides partial ...]

What age costs depends on how far one update moves the policy: `train/mismatch_kl` of tokens that are an update old.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from example_runs import run_example
from figures import Figure, report

EXAMPLE = "partial"
TASK = (
    # One that is learned within 120 steps, of answers whose lengths differ on the way.
    "spec.data.synthetic.symbols=5",
    "spec.reward={parts: [{name: match}, {name: overlong, args: {cache: 20}}]}",
    "spec.rollout.promptsPerStep=32",
    "spec.rollout.maxResponseTokens=24",
)
RATE, STEPS = 2e-4, 300
WHOLE = "synchronous"
WITHOUT = ("spec.rollout.partial=null", "spec.rollout.staleness=null")
SIDES: Mapping[str, tuple[str, ...]] = {
    WHOLE: WITHOUT,
    "partial": (),
    "tail": (*WITHOUT, "spec.rollout.tail.deferLongest=0.2"),
}
SIDES_IN_WORDS = {"partial": "partial rollout", "tail": "tail batching"}
EVERY = 10
HELD_OUT = "held_out"
EVALUATION = f"""
everySteps: {EVERY}
maxPrompts: 64
temperature: 1.0
sets:
  - name: {HELD_OUT}
    synthetic: {{task: RepeatLast, symbols: 5, promptSymbols: 4, answerSymbols: 4, rows: 64, seed: 1}}
"""
MISMATCH = "train/mismatch_kl"
NOT_WORSE = 0.97


def curve(folder: Path, side: str, seed: int, steps: int, lr: float) -> tuple[np.ndarray, float]:
    """Mean reward on the held-out prompts, after each `EVERY` steps; the median of `train/mismatch_kl`."""
    settings = [
        *TASK,
        *SIDES[side],
        f"spec.training.optimizer.lr={lr}",
        f"spec.seed={seed}",
        f"spec.steps={steps}",
        f"spec.evaluation={EVALUATION}",
    ]
    records = run_example(EXAMPLE, folder, f"{side}-{seed}", settings)
    name = f"eval/{HELD_OUT}"
    rewards = [record.metrics[name] for record in records if name in record.metrics]
    mismatch = [value for record in records if (value := record.metrics.get(MISMATCH)) is not None]
    return np.array(rewards), float(np.median(mismatch))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default 1 2 3)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each job (default {STEPS})")
    parser.add_argument("--lr", type=float, default=RATE, help=f"learning rate (default {RATE:g})")
    parser.add_argument("--sides", nargs="+", choices=SIDES_IN_WORDS, default=[*SIDES_IN_WORDS], help="(default all)")
    arguments = parser.parse_args()
    curves: dict[str, list[np.ndarray]] = {side: [] for side in (WHOLE, *arguments.sides)}
    mismatches: dict[str, list[float]] = {side: [] for side in curves}
    with tempfile.TemporaryDirectory(prefix="curves-") as name:
        for seed in arguments.seeds:
            for side in curves:
                found, mismatch = curve(Path(name), side, seed, arguments.steps, arguments.lr)
                curves[side].append(found)
                mismatches[side].append(mismatch)
                values = " ".join(f"{value:.3f}" for value in found)
                print(f"seed {seed}, {side:>11}, {MISMATCH} {mismatch:.4f}: {values}", flush=True)
    means = {side: np.array([one.mean() for one in found]) for side, found in curves.items()}
    ends = {side: min(one[-1] for one in found) for side, found in curves.items()}
    figures = [
        Figure(
            f"Mean held-out reward over {arguments.steps} steps at lr {arguments.lr:g}, {SIDES_IN_WORDS[side]}, "
            f"mean of {len(arguments.seeds)} seeds",
            "synchronous steps",
            float((means[side] / means[WHOLE]).mean()),
            NOT_WORSE,
            note=f"the last evaluations at least {ends[side]:.2f} against {ends[WHOLE]:.2f}; {MISMATCH} "
            f"{np.mean(mismatches[side]):.4f} against {np.mean(mismatches[WHOLE]):.4f}",
        )
        for side in arguments.sides
    ]
    return report(figures)


if __name__ == "__main__":
    sys.exit(main())
