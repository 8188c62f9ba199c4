"""Tools where trainers and engines have devices of their own: the bits of Colocated, and kills in Async."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jobs import ONE_AND_ONE, REPOSITORY, final_state, finish, manifest, run, start_faulty
from support.run_bits import digest_of_trajectories
from support.samples import SEED, unless_drawn
from support.step_lines import read_steps

from rljob_worker.records.trajectories import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

EXAMPLES = REPOSITORY / "examples"
GROUPS, SAMPLES, TURNS, MOST = 4, 4, 2, 2
SHARED = {"profile": "cpu", "devicesPerNode": 1, "threadsPerDevice": 1}
TOOLS = {"tools": [{"python": f"{EXAMPLES}/tools.py:Boxes"}]}


def job_of(folder: Path, steps: int, mode: str, rollout: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    environment = {**TOOLS, "processes": 1, "perProcess": (MOST + 1) * GROUPS * SAMPLES}
    return manifest(
        folder,
        steps=steps,
        mode=mode,
        data={"path": str(EXAMPLES / "tools.jsonl"), "applyChatTemplate": True, "environment": environment},
        reward={"python": f"{EXAMPLES}/tools.py:opened"},
        episodes={"maxTurns": TURNS, "maxTokensPerTurn": 2, "maxTokens": 48, "toolParser": "hermes"},
        training={"precision": "fp32", "optimizer": {"lr": 1.0e-3}},
        rollout={"promptsPerStep": GROUPS, "samplesPerPrompt": SAMPLES, "maxResponseTokens": 2, **rollout},
        resources=SHARED if mode == "Colocated" else ONE_AND_ONE,
        checkpoint={"everySteps": 2, "keep": 2},
        records={"trajectoriesEverySteps": 1, "journal": True},
    )


@unless_drawn("tools apart: staleness 0")
def test_at_staleness_0_they_have_the_bits_of_colocated(tmp_path: Path) -> None:
    runs = {}
    # In Disaggregated and in Async the same code takes turns: `test_lockstep.py` runs both.
    for mode, rollout in (("Colocated", {}), ("Async", {"staleness": {"max": 0}})):
        job = job_of(tmp_path / mode, 3, mode, rollout)
        runs[mode] = tmp_path / mode / "run"
        code, output = run("run", job, "--output", runs[mode])
        assert code == 0, output
    assert final_state(runs["Async"]) == final_state(runs["Colocated"])
    assert digest_of_trajectories(runs["Async"]) == digest_of_trajectories(runs["Colocated"])


@unless_drawn("tools apart: kills")
def test_kills_of_their_host_and_of_the_driver_lose_no_prompt(tmp_path: Path) -> None:
    chance, steps = random.Random(f"{SEED} tools in Async"), 8
    stale = {"staleness": {"max": MOST, "order": "ReadyFirst"}}
    job, folder = job_of(tmp_path, steps, "Async", stale), tmp_path / "run"
    # Between them two checkpoints are due: what is counted of the first is in a record that stays.
    faults = [
        {"do": "kill", "process": process, "phase": phase, "step": step, "delay": chance.uniform(0, lasts)}
        for process, phase, step, lasts in (("environment", "rollout", 2, 0.1), ("driver", "actor_train", 7, 0.1))
    ]
    print(f"RLJOB_SEED={SEED}: {faults}")
    code, output = finish(start_faulty(job, folder, faults), seconds=600)
    assert code != 0, output
    code, output = run("run", job, "--output", folder, "--resume")
    assert code == 0, output
    code, output = run("audit", folder)
    assert (code, f"{steps * GROUPS} trained" in output) == (0, True), output
    latest = {record["step"]: record for record in read_steps(folder)}
    assert latest[steps]["prompts"]["open"] == []
    assert sum(record["metrics"]["rollout/episodes/failures/infra"] for record in read_steps(folder)) >= 1
    for step in range(1, steps + 1):
        check_step(read_trajectories(folder, step)[1], latest[step]["metrics"], step)
    code, output = run("replay", folder, "--step", str(steps))
    assert code == 0, output


def check_step(samples: list[dict[str, Any]], metrics: dict[str, float], step: int) -> None:
    """Its groups are whole and within the bound, and each sampled token is trained on once."""
    assert metrics["rollout/staleness/max"] <= MOST
    assert Counter(Counter(sample["ordinal"] for sample in samples).values()) == {SAMPLES: GROUPS}
    for sample in samples:
        assert 1 <= len(sample["turns"]) <= TURNS
        assert sample["response_tokens"] == sum(turn["tokens"] for turn in sample["turns"])
        assert all(step - 1 - MOST <= span["version"] <= step - 1 for span in sample["spans"])
