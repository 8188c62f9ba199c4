"""Environments that die, hang, raise or lie in a run: counted as what they are, and nothing is lost or twice."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import events, finish, manifest, run, start_faulty
from support.samples import ALL, SEED, unless_all

from rljob_worker.records.trajectories import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, FAULTS = (200, 20) if ALL else (6, 2)
GROUPS, SAMPLES, TURNS = 4, 4, 3
KINDS = {"die": "infra", "hang": "infra", "raise": "data", "lie": "data"}
"""What an action has an environment do, and the class in which that counts."""
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


def job_of(folder: Path, steps: int, **args: Any) -> Path:
    (folder / "world.py").write_text(WORLD)
    environment = {
        "python": f"{folder / 'world.py'}:Walk",
        "args": args,
        "processes": 2,
        "perProcess": 16,
        "deterministic": True,
        # A second is what a step has where nothing else runs: `make test` runs beside others.
        "stepSeconds": 1 if ALL else 6,
    }
    return manifest(
        folder,
        steps=steps,
        data={"seeds": {"count": 10_000}, "applyChatTemplate": True, "environment": environment},
        reward={"name": "environment"},
        episodes={"maxTurns": TURNS, "maxTokensPerTurn": 2, "maxTokens": 60},
        rollout={"promptsPerStep": GROUPS, "samplesPerPrompt": SAMPLES, "maxResponseTokens": 2},
        checkpoint={"everySteps": steps, "keep": 1},
    )


def drawn_faults(steps: int, count: int) -> list[dict[str, Any]]:
    """One action in each of some steps, of a kind each in turn: the first or the last of an episode, or one between."""
    chance = random.Random(f"{SEED} environments")
    kinds = chance.sample(sorted(KINDS), k=len(KINDS))
    chosen = sorted(chance.sample(range(2, steps + 1), k=count))
    return [
        {
            "do": "environment",
            "step": step,
            "call": chance.randint(1, TURNS * GROUPS * SAMPLES - GROUPS),
            "says": kinds[i % len(kinds)],
        }
        for i, step in enumerate(chosen)
    ]


def failures(folder: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in (folder / "steps.jsonl").read_text().splitlines():
        metrics = json.loads(line)["metrics"]
        for kind in ("infra", "data", "replay"):
            found[kind] += int(metrics[f"rollout/episodes/failures/{kind}"])
    return found


def whole_groups(folder: Path, steps: Sequence[int]) -> list[dict[str, Any]]:
    """The samples of some steps, of which each group has all of its own."""
    samples = []
    for step in steps:
        _, of_step = read_trajectories(folder, step)
        assert set(Counter(sample["ordinal"] for sample in of_step).values()) == {SAMPLES}
        assert len(of_step) == GROUPS * SAMPLES
        samples += of_step
    return samples


def test_what_goes_wrong_is_counted_and_loses_nothing(tmp_path: Path) -> None:
    folder, faults = tmp_path / "run", drawn_faults(STEPS, FAULTS)
    print(f"RLJOB_SEED={SEED}: {faults}")
    code, output = finish(start_faulty(job_of(tmp_path, STEPS), folder, faults), seconds=1500)
    assert code == 0, output
    done = Counter(KINDS[event["says"]] for event in events(folder) if event["event"] == "environment")
    assert done == Counter(KINDS[fault["says"]] for fault in faults), "each fault was met"
    assert failures(folder) == done
    samples = whole_groups(folder, range(1, STEPS + 1))
    assert len([sample for sample in samples if sample["turns"][-1].get("error")]) == done["data"]
    code, output = run("audit", folder)
    assert (code, f"{STEPS * GROUPS} trained" in output) == (0, True), output


@unless_all("a job of its own; the share itself is tried in test_episodes_of_turns.py")
def test_a_job_whose_environments_fail_too_often_ends_with_the_bound(tmp_path: Path) -> None:
    code, output = run("run", job_of(tmp_path, 20, raises=0.1), "--output", tmp_path / "run")
    assert code == 1, output
    assert "spec.data.environment: " in output
    assert "of 16 episodes ended with an error, which is more than spec.episodes.maxErrorShare 0.2" in output
    assert "LookupError: no such way" in output
