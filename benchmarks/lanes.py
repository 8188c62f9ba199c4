"""Seconds per step of trainers and engines side by side (staleness 1) against taking turns (staleness 0).

Both are real jobs (`rljob run`: Ray, Megatron, vLLM) of one model, seed and devices, mode Disaggregated, one thread for
each process. The bound is the slower lane's busy time in a step of staleness 1, measured while both lanes run: a step
cannot be shorter than what its slower side does. With fewer free cores than processes, that is what is measured.

    python benchmarks/lanes.py [--steps N] [--skip N] [--set FIELD=VALUE ...]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from example_runs import run_example
from figures import Figure, report

from rljob_api.phases import WAITS
from rljob_api.wire.step_record import StepRecord

REACHES, FASTER = 0.9, 1.25
SETTINGS = [
    "spec.rollout.maxResponseTokens=24",
    "spec.model.random.config.max_position_embeddings=64",
    "spec.resources.threadsPerDevice=1",
    "spec.weightSync.probeEverySteps=0",
    "spec.records.trajectoriesEverySteps=0",
]


def seconds_of(record: StepRecord) -> float:
    """A step, without the checkpoint after the last one."""
    return record.step_seconds - record.phases.get("checkpoint", 0.0)


def busy(record: StepRecord) -> float:
    """What the slower lane did in a step."""
    lanes = (record.phases, *record.lanes.values())
    work = [sum(s for name, s in phases.items() if name not in (*WAITS, "checkpoint")) for phases in lanes]
    return max(work)


def run(folder: Path, name: str, staleness: int, arguments: argparse.Namespace) -> list[StepRecord]:
    """Run one job; the records of its counted steps."""
    steps = arguments.skip + arguments.steps
    own = [f"spec.steps={steps}", f"spec.checkpoint.everySteps={steps}", f"spec.rollout.staleness.max={staleness}"]
    records = run_example("disaggregated", folder, name, [*SETTINGS, *own, *arguments.settings])
    # The last step has nothing made ahead of it.
    return records[arguments.skip : -1]


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="counted steps of each side, and one more (default 30)")
    parser.add_argument("--skip", type=int, default=5, help="steps before them (default 5)")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="FIELD=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lanes-") as name:
        folder = Path(name)
        # Around the other: a machine that grows faster or slower meanwhile must not favour a side.
        before, ahead, after = (
            run(folder, side, k, arguments) for side, k in (("before", 0), ("ahead", 1), ("after", 0))
        )
    turns, side_by_side = mean([seconds_of(r) for r in (*before, *after)]), mean([seconds_of(r) for r in ahead])
    bound = mean([busy(record) for record in ahead])
    bubbles = [mean([r.metrics[f"perf/{lane}_bubble"] or 0.0 for r in ahead]) for lane in ("trainer", "engine")]
    print(
        f"  {len(os.sched_getaffinity(0))} cores; a step in turns {1000 * turns:.0f} ms, side by side "
        f"{1000 * side_by_side:.0f} ms, of which the slower lane works {1000 * bound:.0f} ms; trainers wait "
        f"{bubbles[0]:.0%} of it, engines {bubbles[1]:.0%}"
    )
    return report(
        [
            Figure("Trainers and engines side by side, speed", "in turns (staleness 0)", turns / side_by_side, FASTER),
            Figure("Trainers and engines side by side", "the slower lane's busy time", bound / side_by_side, REACHES),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
