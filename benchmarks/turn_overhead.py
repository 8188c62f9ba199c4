"""Cost of a turn beside what the engine generates in it: environments, tokens of observations, requests, responses.

256 episodes of 8 turns with an environment that answers at once, pace `Together`, so that a turn's overhead hides
behind no other episode. From the records: `rollout` and `env_wait` of a step, without the time in which the engine
generated, by the number of turns. The median of the steps but the first.

    python benchmarks/turn_overhead.py [--steps 7]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "worker" / "driver")]

from figures import Figure, report  # noqa: E402
from jobs import manifest, run  # noqa: E402

from rljob_api.wire.step_record import StepRecord  # noqa: E402
from rljob_worker.records.steps import read_steps  # noqa: E402

GOAL = 15.0
GROUPS, SAMPLES, TURNS = 32, 8, 8
ENGINE = "engine-0"
WORLD = """
import random

class Quick:
    def reset(self, *, seed, options):
        self.random = random.Random(seed)
        return f"at {self.random.randrange(9)}", {}

    def step(self, action):
        return f"at {self.random.randrange(9)}", float(len(action) % 2), False, False, {}
"""


def overhead(record: StepRecord) -> float:
    """Milliseconds of a turn in which the engine generated nothing."""
    generated = sum(end - begin for begin, end in record.ranks[ENGINE]["rollout"])
    turns = record.metric("rollout/episodes/turns/max")
    assert turns == TURNS, f"{turns} turns"
    return 1e3 * (record.phases["rollout"] + record.phases["env_wait"] - generated) / TURNS


def records_of(folder: Path, steps: int) -> list[StepRecord]:
    """Records of a job's steps; SystemExit where it failed."""
    (folder / "quick.py").write_text(WORLD)
    environment = {"python": f"{folder / 'quick.py'}:Quick", "processes": 1, "perProcess": GROUPS * SAMPLES}
    spec = {
        "steps": steps,
        "data": {"seeds": {"count": 10_000}, "applyChatTemplate": True, "environment": environment},
        "reward": {"name": "environment"},
        "episodes": {"maxTurns": TURNS, "maxTokensPerTurn": 2, "maxTokens": 63},
        "rollout": {"promptsPerStep": GROUPS, "samplesPerPrompt": SAMPLES, "maxResponseTokens": 2},
        "checkpoint": {"everySteps": steps},
    }
    wide = ["hidden_size=128", "intermediate_size=256"]
    settings = [f"--set=spec.model.random.config.{one}" for one in wide]
    code, output = run("run", manifest(folder, **spec), "--output", folder / "run", *settings)
    if code:
        raise SystemExit(output)
    return read_steps(folder / "run")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7, help="(default 7)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="turn-overhead-") as name:
        costs = [overhead(record) for record in records_of(Path(name), given.steps)[1:]]
    note = " ".join(f"{cost:.1f}" for cost in costs)
    what = f"A turn of {GROUPS * SAMPLES} episodes beside what the engine generates, ms"
    return report([Figure(what, "the engine's own time", statistics.median(costs), GOAL, at_most=True, note=note)])


if __name__ == "__main__":
    sys.exit(main())
