"""Pace of episodes: a step's time with `Together` against that with `Free`, where environments wait.

Each step of the environment waits for a time of its own (log-normal, median 0.2 s, sigma 1), on which no answer
depends; samples of one prompt wait for different times too. Each episode has a process of its own, so that
environments wait beside each other. Both runs sample with the same noise: where their engines round alike, they
sample the same tokens.

    python benchmarks/episode_pace.py [--mode Colocated Async] [--steps 4]

Times are those of steps but the first.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "worker" / "driver")]

from figures import Figure, report  # noqa: E402
from jobs import ONE_AND_ONE, manifest, run  # noqa: E402

from rljob_api.spec import Pace  # noqa: E402
from rljob_worker.records.steps import read_steps  # noqa: E402

GOALS = {"Colocated": 2.0, "Async": 2.0}
GROUPS, SAMPLES, TURNS = 8, 4, 12
WAITING = """
import math, random, time

class Waiting:
    def reset(self, *, seed, options):
        self.random, self.waits = random.Random(seed), random.Random()
        return f"at {self.random.randrange(9)}", {}

    def step(self, action):
        time.sleep(self.waits.lognormvariate(math.log(0.2), 1.0))
        return f"at {self.random.randrange(9)}", float(len(action) % 2), False, False, {}
"""


def seconds_of(folder: Path, mode: str, pace: Pace, steps: int) -> float:
    """Seconds of all steps of a job but the first; SystemExit where it failed, or its audit."""
    folder.mkdir(parents=True)
    (folder / "waiting.py").write_text(WAITING)
    open_at_once = GROUPS * SAMPLES * (1 if mode == "Colocated" else 2)
    spec = {
        "steps": steps,
        "mode": mode,
        "data": {
            "seeds": {"count": 10_000},
            "applyChatTemplate": True,
            "environment": {
                "python": f"{folder / 'waiting.py'}:Waiting",
                "processes": open_at_once,
                "perProcess": 1,
                "deterministic": True,
            },
        },
        "reward": {"name": "environment"},
        "episodes": {"maxTurns": TURNS, "maxTokensPerTurn": 1, "maxTokens": 63, "pace": pace.value},
        "rollout": {"promptsPerStep": GROUPS, "samplesPerPrompt": SAMPLES, "maxResponseTokens": 1},
        "checkpoint": {"everySteps": steps},
        "records": {"journal": True},
    }
    if mode == "Async":
        spec |= {"resources": ONE_AND_ONE}
        spec["rollout"] |= {"staleness": {"max": 1}}  # type: ignore[operator]
    code, output = run("run", manifest(folder, **spec), "--output", folder / "run")
    if not code:
        code, output = run("audit", folder / "run")
    if code:
        raise SystemExit(output)
    records = read_steps(folder / "run")[1:]
    waits = sum(one.phases.get("env_wait", 0.0) for one in records)
    seconds = sum(one.step_seconds for one in records)
    print(f"{mode}, {pace}: {seconds:.1f} s, env_wait {waits:.1f} s", flush=True)
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=list(GOALS), default=list(GOALS), help="(default both)")
    parser.add_argument("--steps", type=int, default=4, help="(default 4)")
    given = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory(prefix="episode-pace-") as name:
        for mode in given.mode:
            together, free = (seconds_of(Path(name) / f"{mode}-{pace}", mode, pace, given.steps) for pace in Pace)
            what = f"{mode}: {GROUPS * SAMPLES} episodes of {TURNS} turns that wait 0.2 s (log-normal), pace `Free`"
            note = f"{together:.1f} s, {free:.1f} s"
            rows.append(Figure(what, "`Together`", together / free, GOALS[mode], note=note))
    return report(rows)


if __name__ == "__main__":
    sys.exit(main())
