"""Jobs whose environments die, hang, raise or lie at chosen steps, and their records."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import ONE_AND_ONE, manifest
from support.samples import SEED

from rljob_worker.records.trajectories import read_trajectories

GROUPS, SAMPLES, TURNS = 4, 4, 3
KINDS = {"die": "infra", "hang": "infra", "raise": "data", "lie": "data"}
"""Words that ask an environment for a fault, and the class in which that counts."""
MODES: dict[str, dict[str, Any]] = {
    "Colocated": {},
    "Async": {"resources": ONE_AND_ONE, "staleness": {"max": 2}},
}
WORLD = """
import os, random, time

class Walk:
    def __init__(self, raises=0.0):
        self.raises = raises

    def reset(self, *, seed, options):
        self.random = random.Random(seed)
        return f"at {self.random.randrange(9)}", {}

    def step(self, action):
        if action == "die":
            os._exit(7)
        if action == "hang":
            time.sleep(600)
        if action == "raise" or self.random.random() < self.raises:
            raise LookupError("no such way")
        if action == "lie":
            return 7, float("nan"), "no", False, {}
        return f"at {self.random.randrange(9)}", float(len(action) % 2), False, False, {}
"""


def job_of(folder: Path, steps: int, *, mode: str = "Colocated", step_seconds: float = 6, **args: Any) -> Path:
    """The manifest of a job; `step_seconds`: a second is what a step has where nothing else runs."""
    (folder / "world.py").write_text(WORLD)
    environment = {
        "python": f"{folder / 'world.py'}:Walk",
        "args": args,
        "processes": 2,
        "perProcess": 24,
        "deterministic": True,
        "stepSeconds": step_seconds,
    }
    more = dict(MODES[mode])
    staleness = {"staleness": more.pop("staleness")} if "staleness" in more else {}
    rollout = {"promptsPerStep": GROUPS, "samplesPerPrompt": SAMPLES, "maxResponseTokens": 2, **staleness}
    return manifest(
        folder,
        steps=steps,
        mode=mode,
        data={
            "seeds": {"first": _calm_seed(args.get("raises", 0.0)), "count": 10_000},
            "applyChatTemplate": True,
            "environment": environment,
        },
        reward={"name": "environment"},
        episodes={"maxTurns": TURNS, "maxTokensPerTurn": 2, "maxTokens": 60},
        rollout=rollout,
        checkpoint={"everySteps": steps, "keep": 1},
        **more,
    )


def _calm_seed(raises: float) -> int:
    """The first of two seeds with which the trial before the start raises nothing."""

    def is_calm(seed: int) -> bool:
        chance = random.Random(seed)
        return all(draw >= raises for _, draw in [(chance.randrange(9), chance.random()) for _ in range(12)])

    for seed in range(10_000):
        if is_calm(seed) and is_calm(seed + 1):
            return seed
    raise AssertionError(f"no seed below 10,000 is calm at {raises}")


def drawn_faults(steps: int, count: int) -> list[dict[str, Any]]:
    """One action in each of some steps, of a kind each in turn: the first or the last of an episode, or one between.

    None in the last steps: in mode `Async` their episodes have been played by then.
    """
    chance = random.Random(f"{SEED} environments")
    kinds = chance.sample(sorted(KINDS), k=len(KINDS))
    chosen = sorted(chance.sample(range(2, steps - 1), k=count))
    return [
        {
            "do": "environment",
            "step": step,
            "call": chance.randint(1, TURNS * GROUPS * SAMPLES - GROUPS),
            "says": kinds[i % len(kinds)],
        }
        for i, step in enumerate(chosen)
    ]


def classes(said: Sequence[dict[str, Any]]) -> Counter[str]:
    """Faults, or their events, by the class in which each counts."""
    return Counter(KINDS[one["says"]] for one in said)


def failures(folder: Path) -> Counter[str]:
    """Failures that a run counts in its records, by class."""
    found: Counter[str] = Counter()
    for line in (folder / "steps.jsonl").read_text().splitlines():
        metrics = json.loads(line)["metrics"]
        for kind in ("infra", "data", "replay"):
            # An asynchronous step may play no episode.
            found[kind] += int(metrics.get(f"rollout/episodes/failures/{kind}", 0))
    return +found


def whole_groups(folder: Path, steps: Sequence[int]) -> list[dict[str, Any]]:
    """The samples of some steps, of which each group has all of its own."""
    samples = []
    for step in steps:
        _, of_step = read_trajectories(folder, step)
        assert set(Counter(sample["ordinal"] for sample in of_step).values()) == {SAMPLES}
        assert len(of_step) == GROUPS * SAMPLES
        samples += of_step
    return samples
