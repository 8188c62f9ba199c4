"""Episodes in mode Async: carried through updates of the weights, made anew after kills, and none lost or twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from jobs import ONE_AND_ONE, finish, manifest, run, start_faulty
from support.samples import SEED, unless_all, unless_drawn
from support.step_lines import read_steps

from rljob_api.spec import Pace
from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.records.trajectories import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

GROUPS, SAMPLES, MOST, TURNS = 4, 4, 2, 6
WALK = """
import random, time

class Walk:
    def reset(self, *, seed, options):
        self.random, self.said = random.Random(seed), []
        return f"at {self.random.randrange(9)}", {}

    def step(self, action):
        # Some updates of the weights come while an environment is asked.
        time.sleep(min(0.2, self.random.expovariate(50)))
        self.said.append(action)
        reward = float(sum(map(len, self.said)) % 2)
        return f"at {self.random.randrange(9)} after {len(''.join(self.said)) % 9}", reward, False, False, {}
"""
PLACES = [
    *((process, "rollout", 0.5) for process in ("driver", "trainer-0", "engine-0", "environment")),
    *((process, "actor_train", 0.1) for process in ("driver", "trainer-0", "engine-0", "environment")),
    *((process, "update_weights", 0.01) for process in ("driver", "engine-0")),
]
"""Process, phase of its lane, and about how long that lasts."""


def job_of(folder: Path, steps: int, pace: Pace = Pace.TOGETHER) -> Path:
    (folder / "walk.py").write_text(WALK)
    walk = {"python": f"{folder / 'walk.py'}:Walk", "processes": 2, "perProcess": 24, "deterministic": True}
    held_out = {"seeds": {"first": 50_000, "count": 6}, "applyChatTemplate": True, "environment": walk}
    return manifest(
        folder,
        steps=steps,
        mode="Async",
        data={"seeds": {"count": 10_000}, "applyChatTemplate": True, "environment": walk},
        reward={"name": "environment"},
        episodes={"maxTurns": TURNS, "maxTokensPerTurn": 2, "maxTokens": 63, "pace": pace.value},
        training={"precision": "fp32", "optimizer": {"lr": 1.0e-3}},
        rollout={
            "promptsPerStep": GROUPS,
            "samplesPerPrompt": SAMPLES,
            "maxResponseTokens": 2,
            "staleness": {"max": MOST, "order": "ReadyFirst"},
        },
        evaluation={"everySteps": 4, "data": held_out},
        resources=ONE_AND_ONE,
        checkpoint={"everySteps": 2, "keep": steps},
        records={"trajectoriesEverySteps": 1, "journal": True},
    )


def check_whole(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Each prompt was trained on once, whole and within the bound; no episode began anew."""
    code, output = run("audit", folder)
    assert (code, f"{steps * GROUPS} trained" in output) == (0, True), output
    latest = {record["step"]: record for record in read_steps(folder)}
    assert latest[steps]["prompts"]["open"] == []
    samples = []
    for step in range(1, steps + 1):
        metrics = latest[step]["metrics"]
        assert metrics["rollout/staleness/max"] <= MOST
        assert metrics["rollout/episodes/restarted"] == metrics["rollout/episodes/failures/replay"] == 0
        # From the engine, turn by turn and under several weights, and from one reading of the whole stream.
        of_step = read_trajectories(folder, step)[1]
        assert len(of_step) == GROUPS * SAMPLES
        for sample in of_step:
            assert all(step - 1 - MOST <= span["version"] <= step - 1 for span in sample["spans"])
            assert sample["response_tokens"] == sum(turn["tokens"] for turn in sample["turns"])
            assert len(sample["turns"]) == TURNS
            assert sample["reward"] == pytest.approx(sum(turn["reward"] for turn in sample["turns"]))
        samples += of_step
    return samples


def kill(place: tuple[str, str, float], step: int, chance: random.Random) -> dict[str, Any]:
    process, phase, lasts = place
    return {"do": "kill", "process": process, "phase": phase, "step": step, "delay": chance.uniform(0, lasts)}


@pytest.mark.parametrize(
    "pace", [pytest.param(pace, marks=unless_drawn(f"episodes in Async: {pace.value}")) for pace in Pace]
)
def test_episodes_go_on_through_updates_and_kills(tmp_path: Path, pace: Pace) -> None:
    chance, steps = random.Random(f"{SEED} episodes async {pace}"), 8
    job, folder = job_of(tmp_path, steps, pace), tmp_path / "run"
    host = kill(("environment", "rollout", 0.5), 2, chance)
    # Three steps before the last, which are longer than any delay.
    killed = kill(chance.choice([place for place in PLACES if place[0] != "environment"]), 5, chance)
    print(f"RLJOB_SEED={SEED}: {host}, {killed}")
    code, output = finish(start_faulty(job, folder, [host, killed]), seconds=600)
    assert code != 0, (killed, output)
    kept = Checkpoints(folder / "checkpoints").latest()
    assert kept is not None, output
    code, output = run("run", job, "--output", folder, "--resume")
    assert code == 0, output
    samples = check_whole(folder, steps)
    assert any(len({span["version"] for span in sample["spans"]}) > 1 for sample in samples), "none was carried over"
    metrics = [record["metrics"] for record in read_steps(folder)]
    assert sum(one["rollout/episodes/failures/infra"] for one in metrics) >= 1
    assert any("eval/" in name for one in metrics for name in one)
    code, output = run("replay", folder, "--step", str(steps))
    assert code == 0, output


@unless_all("20 kills")
def test_20_kills_lose_no_episode(tmp_path: Path) -> None:
    steps, kills, chance = 200, 20, random.Random(f"{SEED} 20 kills of episodes")
    job, folder = job_of(tmp_path, steps), tmp_path / "run"
    for number in range(kills):
        place = PLACES[number % len(PLACES)]
        faults = [kill(place, 9 * (number + 1), chance)]
        if place[0] == "environment":
            # A host is replaced, and the run goes on.
            faults.append(kill(("driver", "actor_train", 0.1), 9 * (number + 1) + 1, chance))
        resume = ["--resume"] if folder.exists() else []
        code, output = finish(start_faulty(job, folder, faults, *resume), 600)
        assert code != 0, (faults, output)
    code, output = run("run", job, "--output", folder, "--resume")
    assert code == 0, output
    check_whole(folder, steps)
