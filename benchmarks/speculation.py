"""Seconds of rollout with speculative decoding against without, once the policy can be guessed.

Both are the same job (`examples/speculative.yaml`: Ray, Megatron, vLLM), whose policy learns to repeat a symbol.
Compared are the medians of its last quarter of steps. Responses are the same: the rewards of all steps are compared.

    python benchmarks/speculation.py [--steps N] [--set FIELD=VALUE ...]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from example_runs import run_example
from figures import Figure, report

from rljob_api.metrics import REWARD_KEY
from rljob_api.wire.step_record import StepRecord

FASTER = 1.1


def rollout(records: Sequence[StepRecord]) -> float:
    """Seconds of a step's generation, in the median."""
    return median(record.phases["rollout"] for record in records)


def acceptance(records: Sequence[StepRecord]) -> float:
    """Share of the guesses that were right, in the median of the steps that guessed."""
    return median(value for r in records if (value := r.metric("rollout/drafts/acceptance")) is not None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of each side (default 200)")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="FIELD=VALUE")
    arguments = parser.parse_args()
    settings = [f"spec.steps={arguments.steps}", *arguments.settings]
    with tempfile.TemporaryDirectory(prefix="speculation-") as name:
        folder, without = Path(name), ["spec.rollout.speculative=null"]
        # Around the other: a machine that grows faster or slower meanwhile must not favour a side.
        before, guessing, after = (
            run_example("speculative", folder, side, [*settings, *more])
            for side, more in (("before", without), ("guessing", []), ("after", without))
        )
    rewards = [[record.metric(REWARD_KEY) for record in records] for records in (before, guessing, after)]
    same = sum(ours == plain for ours, plain in zip(rewards[1], rewards[0], strict=True))
    last = arguments.steps - arguments.steps // 4
    plain, ours = rollout([*before[last:], *after[last:]]), rollout(guessing[last:])
    print(
        f"  rewards are equal in {same} of {arguments.steps} steps; in the last {arguments.steps - last}: rollout "
        f"{1000 * plain:.0f} ms without, {1000 * ours:.0f} ms with guesses, of which {acceptance(guessing[last:]):.0%} "
        f"were right (in the first ten steps {acceptance(guessing[:10]):.0%}; rollout "
        f"{1000 * rollout([*before[:10], *after[:10]]):.0f} and {1000 * rollout(guessing[:10]):.0f} ms)"
    )
    what = "Rollout with speculative decoding, a policy that repeats itself, speed"
    return report([Figure(what, "the same job without", plain / ours, FASTER)])


if __name__ == "__main__":
    sys.exit(main())
