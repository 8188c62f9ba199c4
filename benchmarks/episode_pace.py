"""Pace of episodes: a step's time with `Together` against that with `Free`, where environments wait; and `env_wait`
against the time in which engines have nothing to do.

Each step of the environment waits for a time of its own (log-normal, sigma 1), on which no answer depends; samples of
one prompt wait for different times too. In `Colocated` and `Async` (median 0.2 s) each episode has a process of its
own, so that environments wait beside each other; with `16 hosts` (mean 50 ms) 256 episodes have 16 processes, which do
one thing after the other. Both runs sample with the same noise: where their engines round alike, they sample the same
tokens.

`env_wait` is that of four episodes in each of four processes whose steps take 50 ms: 0.2 s a turn.

    python benchmarks/episode_pace.py [--only Colocated Async '16 hosts' env_wait] [--steps 4]

Times are those of steps but the first.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "worker" / "driver")]

from figures import Figure, report  # noqa: E402
from jobs import ONE_AND_ONE, manifest, run  # noqa: E402

from rljob_api.spec import Pace  # noqa: E402
from rljob_api.wire.step_record import StepRecord  # noqa: E402
from rljob_worker.records.steps import read_steps  # noqa: E402

WAITING = """
import random, time

class Waiting:
    def reset(self, *, seed, options):
        self.random, self.waits = random.Random(seed), random.Random()
        return f"at {self.random.randrange(9)}", {}

    def step(self, action):
        time.sleep(self.waits.lognormvariate(%r, %r))
        return f"at {self.random.randrange(9)}", float(len(action) %% 2), False, False, {}
"""
STEP, AWAY = 0.05, 0.1
"""Seconds of a step of the environment of which `env_wait` is computed, and how far off it may be."""


@dataclass(frozen=True)
class Case:
    """A job whose environments wait.

    Attributes:
        goal: `Together`'s time by that of `Free`.
        median: of a step's wait in seconds; `sigma` is that of its logarithm.
        processes: hosts; None: as many as there are open episodes.
    """

    goal: float
    median: float
    sigma: float = 1.0
    mode: str = "Colocated"
    groups: int = 8
    samples: int = 4
    turns: int = 12
    processes: int | None = None

    @property
    def episodes(self) -> int:
        return self.groups * self.samples


CASES = {
    "Colocated": Case(2.0, 0.2),
    "Async": Case(2.0, 0.2, mode="Async"),
    # The mean is that of a log-normal by sigma**2 / 2 above its median.
    "16 hosts": Case(1.3, 0.05 * math.exp(-0.5), groups=32, samples=8, turns=8, processes=16),
}
IDLE = Case(1.0, STEP, sigma=0.0, groups=4, processes=4)


def records_of(folder: Path, case: Case, pace: Pace, steps: int) -> list[StepRecord]:
    """Records of all steps of a job but the first; SystemExit where it failed, or its audit."""
    folder.mkdir(parents=True)
    (folder / "waiting.py").write_text(WAITING % (math.log(case.median), case.sigma))
    open_at_once = case.episodes * (1 if case.mode == "Colocated" else 2)
    processes = case.processes or open_at_once
    spec = {
        "steps": steps,
        "mode": case.mode,
        "data": {
            "seeds": {"count": 10_000},
            "applyChatTemplate": True,
            "environment": {
                "python": f"{folder / 'waiting.py'}:Waiting",
                "processes": processes,
                "perProcess": open_at_once // processes,
                "deterministic": True,
            },
        },
        "reward": {"name": "environment"},
        "episodes": {"maxTurns": case.turns, "maxTokensPerTurn": 1, "maxTokens": 63, "pace": pace.value},
        "rollout": {"promptsPerStep": case.groups, "samplesPerPrompt": case.samples, "maxResponseTokens": 1},
        "checkpoint": {"everySteps": steps},
        "records": {"journal": True},
    }
    if case.mode == "Async":
        spec |= {"resources": ONE_AND_ONE}
        spec["rollout"] |= {"staleness": {"max": 1}}  # type: ignore[operator]
    code, output = run("run", manifest(folder, **spec), "--output", folder / "run")
    if not code:
        code, output = run("audit", folder / "run")
    if code:
        raise SystemExit(output)
    return read_steps(folder / "run")[1:]


def faster(name: str, folder: Path, steps: int) -> Figure:
    """Time of `Together` by that of `Free`."""
    case, seconds = CASES[name], {}
    for pace in Pace:
        records = records_of(folder / pace.value, case, pace, steps)
        waits = sum(one.phases.get("env_wait", 0.0) for one in records)
        seconds[pace] = sum(one.step_seconds for one in records)
        print(f"{name}, {pace}: {seconds[pace]:.1f} s, env_wait {waits:.1f} s", flush=True)
    together, free = seconds[Pace.TOGETHER], seconds[Pace.FREE]
    what = f"{name}: {case.episodes} episodes of {case.turns} turns that wait, pace `Free`"
    return Figure(what, "`Together`", together / free, case.goal, note=f"{together:.1f} s, {free:.1f} s")


def away(folder: Path, steps: int) -> Figure:
    """Distance of `env_wait` from the time in which environments step, as a share of that."""
    records = records_of(folder, IDLE, Pace.TOGETHER, steps)
    assert IDLE.processes is not None
    computed = len(records) * IDLE.turns * STEP * IDLE.episodes / IDLE.processes
    waits = sum(one.phases["env_wait"] for one in records)
    note = f"{waits:.2f} s, {computed:.2f} s"
    return Figure("`env_wait`, off", "the computed idle time", abs(waits / computed - 1), AWAY, at_most=True, note=note)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*CASES, "env_wait"]
    parser.add_argument("--only", nargs="+", choices=every, default=every, help="(default all)")
    parser.add_argument("--steps", type=int, default=4, help="(default 4)")
    given = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory(prefix="episode-pace-") as name:
        for one in given.only:
            folder = Path(name) / one.replace(" ", "-")
            rows.append(away(folder, given.steps) if one == "env_wait" else faster(one, folder, given.steps))
    return report(rows)


if __name__ == "__main__":
    sys.exit(main())
