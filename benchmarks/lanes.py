"""Seconds per step of trainers and engines side by side against taking turns (staleness 0).

All are real jobs (`rljob run`: Ray, Megatron, vLLM) of one model, seed and devices, one thread for each process. With
fewer free cores than processes, that is what is measured.

- Mode Disaggregated, one step ahead. The bound is the slower lane's busy time in a step, measured while both lanes run:
  a step cannot be shorter than what its slower side does.
- Mode Async, two steps ahead: against the same bound, over all counted steps, with rewards that cost nothing; and
  against taking turns with rewards that take a second (log-normal, mean 1 s, sigma 0.5; all run at once).
- Both: what is in no phase of a lane, by the median over steps, is at most 1 % of the step or 20 ms. (Of
  mode Async the engines' lane alone.)

    python benchmarks/lanes.py [--mode Disaggregated|Async] [--steps N] [--skip N] [--set FIELD=VALUE ...]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from example_runs import run_example
from figures import Figure, report

from rljob_api.phases import WAITS
from rljob_api.wire.step_record import StepRecord

REACHES, FASTER, FASTER_ASYNC = 0.9, 1.25, 1.6
AHEAD = 2
"""Staleness of mode Async."""
SLOW_REWARD = """\
import asyncio, random

async def score(response, **_):
    await asyncio.sleep(random.lognormvariate(-0.125, 0.5))
    return float(len(set(response)))
"""
# Those that are open at once fit into the calls of one async reward.
FEWER = ["spec.rollout.promptsPerStep=8"]
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


def busy(record: StepRecord) -> list[float]:
    """Busy seconds of each lane in a step."""
    lanes = (record.phases, *record.lanes.values())
    return [sum(s for name, s in phases.items() if name not in (*WAITS, "checkpoint")) for phases in lanes]


def run(folder: Path, name: str, staleness: int, arguments: argparse.Namespace, *settings: str) -> list[StepRecord]:
    """Run one job; the records of its counted steps."""
    # The last steps have nothing made ahead of them.
    steps = arguments.skip + arguments.steps + AHEAD
    own = [f"spec.steps={steps}", f"spec.checkpoint.everySteps={steps}", f"spec.rollout.staleness.max={staleness}"]
    example = "disaggregated" if staleness <= 1 else "async"
    records = run_example(example, folder, name, [*SETTINGS, *own, *settings, *arguments.settings])
    return records[arguments.skip : -AHEAD]


def in_no_phase(records: Sequence[StepRecord], *lanes: str) -> Figure:
    """The lane with the most time outside its phases, against the goal of `other`."""
    shares = {lane: [outside(record, lane) / goal_of(record) for record in records] for lane in lanes}
    worst, share = max(((lane, float(np.median(of_lane))) for lane, of_lane in shares.items()), key=lambda it: it[1])
    return Figure("Outside every phase of a lane", "1 % of the step, or 20 ms", share, 1.0, at_most=True, note=worst)


def outside(record: StepRecord, lane: str) -> float:
    """Seconds of a step in no phase of a lane."""
    phases = record.phases if lane == "trainer" else record.lanes[lane]
    return record.step_seconds - sum(phases.values())


def goal_of(record: StepRecord) -> float:
    """Seconds of a step that may be in no phase."""
    return max(0.01 * record.step_seconds, 0.02)


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def tell(name: str, turns: float | None, ahead: Sequence[StepRecord], bound: float) -> None:
    waits = [mean(r.metrics[f"perf/{lane}_bubble"] or 0.0 for r in ahead) for lane in ("trainer", "engine")]
    in_turns = "" if turns is None else f"a step in turns {1000 * turns:.0f} ms, "
    print(
        f"  {name}, {len(os.sched_getaffinity(0))} cores: {in_turns}side by side "
        f"{1000 * mean(map(seconds_of, ahead)):.0f} ms, of which the slower lane works {1000 * bound:.0f} ms; trainers "
        f"wait {waits[0]:.0%} of it, engines {waits[1]:.0%}"
    )


def against_turns(
    folder: Path, staleness: int, arguments: argparse.Namespace, *settings: str
) -> tuple[float, list[StepRecord], float]:
    """Seconds of a step in turns, the records side by side, and their seconds of a step."""
    # Around the other: a machine that grows faster or slower meanwhile must not favour a side.
    before, ahead, after = (
        run(folder, side, k, arguments, *settings) for side, k in (("before", 0), ("ahead", staleness), ("after", 0))
    )
    return mean(map(seconds_of, (*before, *after))), ahead, mean(map(seconds_of, ahead))


def lockstep(folder: Path, arguments: argparse.Namespace) -> list[Figure]:
    turns, ahead, side_by_side = against_turns(folder, 1, arguments)
    bound = mean(max(busy(record)) for record in ahead)
    tell("one step ahead", turns, ahead, bound)
    return [
        Figure("Trainers and engines side by side, speed", "in turns (staleness 0)", turns / side_by_side, FASTER),
        Figure("Trainers and engines side by side", "the slower lane's busy time", bound / side_by_side, REACHES),
        in_no_phase(ahead, "trainer", "engine"),
    ]


def asynchronous(folder: Path, arguments: argparse.Namespace) -> list[Figure]:
    quick = run(folder, "quick", AHEAD, arguments)
    bound = max(np.mean([busy(record) for record in quick], axis=0))
    tell("asynchronous, rewards at once", None, quick, bound)
    (folder / "slow_reward.py").write_text(SLOW_REWARD)
    reward = 'spec.reward={"python": "slow_reward:score", "timeoutSeconds": 60}'
    slow = (*FEWER, reward, f'spec.environment.pythonPath=["{folder}"]')
    turns, ahead, side_by_side = against_turns(folder, AHEAD, arguments, *slow)
    tell("asynchronous, slow rewards", turns, ahead, max(np.mean([busy(record) for record in ahead], axis=0)))
    took = mean(map(seconds_of, quick))
    return [
        Figure("Asynchronous, slow rewards, speed", "in turns (staleness 0)", turns / side_by_side, FASTER_ASYNC),
        Figure("Asynchronous, rewards at once", "the slower lane's busy time", bound / took, REACHES),
        in_no_phase(ahead, "engine"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["Disaggregated", "Async"], default="Disaggregated")
    parser.add_argument("--steps", type=int, default=30, help="counted steps of each side (default 30)")
    parser.add_argument("--skip", type=int, default=5, help="steps before them (default 5)")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="FIELD=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lanes-") as name:
        measure = lockstep if arguments.mode == "Disaggregated" else asynchronous
        return report(measure(Path(name), arguments))


if __name__ == "__main__":
    sys.exit(main())
