"""Tools and agents where trainers and engines have devices of their own: the bits of Colocated, and kills."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jobs import ONE_AND_ONE, REPOSITORY, events, final_state, finish, manifest, run, start_faulty
from support.run_bits import digest_of_trajectories
from support.samples import SEED, unless_drawn
from support.step_lines import read_steps

from rljob_worker.records.trajectories import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

EXAMPLES = REPOSITORY / "examples"
GROUPS, SAMPLES, TURNS = 4, 4, 2
STALE: dict[str, dict[str, Any]] = {"Async": {"max": 2, "order": "ReadyFirst"}, "Disaggregated": {"max": 1}}
MOST = max(one["max"] for one in STALE.values())
SHARED = {"profile": "cpu", "devicesPerNode": 1, "threadsPerDevice": 1}
PLAYED: dict[str, dict[str, Any]] = {
    "tools": {
        "environment": {"tools": [{"python": f"{EXAMPLES}/tools.py:Boxes"}]},
        "reward": {"python": f"{EXAMPLES}/tools.py:opened"},
        "parser": {"toolParser": "hermes"},
    },
    # The second call begins a stream of its own.
    "agents": {
        "environment": {"agent": {"python": f"{EXAMPLES}/agent.py:play"}, "args": {"forget": True}},
        "reward": {"name": "environment"},
        "parser": {},
    },
}


def each_kind(what: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=unless_drawn(f"{kind} apart: {what}")) for kind in PLAYED]
    )


def job_of(folder: Path, kind: str, steps: int, mode: str, rollout: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    played = PLAYED[kind]
    environment = {**played["environment"], "processes": 1, "perProcess": (MOST + 1) * GROUPS * SAMPLES}
    return manifest(
        folder,
        steps=steps,
        mode=mode,
        data={"path": str(EXAMPLES / "tools.jsonl"), "applyChatTemplate": True, "environment": environment},
        reward=played["reward"],
        episodes={"maxTurns": TURNS, "maxTokensPerTurn": 2, "maxTokens": 48, **played["parser"]},
        training={"precision": "fp32", "optimizer": {"lr": 1.0e-3}},
        rollout={"promptsPerStep": GROUPS, "samplesPerPrompt": SAMPLES, "maxResponseTokens": 2, **rollout},
        resources=SHARED if mode == "Colocated" else ONE_AND_ONE,
        checkpoint={"everySteps": 2, "keep": 2},
        records={"trajectoriesEverySteps": 1, "journal": True},
    )


@each_kind("staleness 0")
def test_at_staleness_0_they_have_the_bits_of_colocated(kind: str, tmp_path: Path) -> None:
    runs = {}
    # In Disaggregated and in Async the same code takes turns: `test_lockstep.py` runs both.
    for mode, rollout in (("Colocated", {}), ("Async", {"staleness": {"max": 0}})):
        job = job_of(tmp_path / mode, kind, 3, mode, rollout)
        runs[mode] = tmp_path / mode / "run"
        code, output = run("run", job, "--output", runs[mode])
        assert code == 0, output
    assert final_state(runs["Async"]) == final_state(runs["Colocated"])
    assert digest_of_trajectories(runs["Async"]) == digest_of_trajectories(runs["Colocated"])


@each_kind("kills")
def test_kills_of_their_host_and_of_the_driver_lose_no_prompt(kind: str, tmp_path: Path) -> None:
    chance, steps = random.Random(f"{SEED} {kind} apart"), 8
    mode = chance.choice(list(STALE))
    job, folder = job_of(tmp_path, kind, steps, mode, {"staleness": STALE[mode]}), tmp_path / "run"
    # Between them two checkpoints are due: what is counted of the first is in a record that stays.
    faults = [
        {"do": "kill", "process": process, "phase": phase, "step": step, "delay": chance.uniform(0, lasts)}
        for process, phase, step, lasts in (("environment", "rollout", 2, 0.1), ("driver", "actor_train", 7, 0.1))
    ]
    print(f"RLJOB_SEED={SEED}: {mode}, {faults}")
    code, output = finish(start_faulty(job, folder, faults), seconds=600)
    last = events(folder)[-1]
    assert (code, last["event"], last.get("process")) == (-signal.SIGKILL, "kill", "driver"), output
    code, output = run("run", job, "--output", folder, "--resume")
    assert code == 0, output
    code, output = run("audit", folder)
    assert (code, f"{steps * GROUPS} trained" in output) == (0, True), output
    latest = {record["step"]: record for record in read_steps(folder)}
    assert latest[steps]["prompts"]["open"] == []
    # A step whose batch was made by the attempt before asked no environment for anything.
    assert sum(record["metrics"].get("rollout/episodes/failures/infra", 0.0) for record in read_steps(folder)) >= 1
    for step in range(1, steps + 1):
        check_step(read_trajectories(folder, step)[1], latest[step]["metrics"], step, STALE[mode]["max"], kind)
    code, output = run("replay", folder, "--step", str(steps))
    assert code == 0, output


def check_step(samples: list[dict[str, Any]], metrics: dict[str, float], step: int, most: int, kind: str) -> None:
    """Its groups are whole and within the bound, and each sampled token is trained on once."""
    assert metrics["rollout/staleness/max"] <= most
    assert Counter(Counter(sample["ordinal"] for sample in samples).values()) == {SAMPLES: GROUPS}
    for sample in samples:
        assert 1 <= len(sample["turns"]) <= TURNS
        assert sample["response_tokens"] == sum(turn["tokens"] for turn in sample["turns"])
        assert all(step - 1 - most <= span["version"] <= step - 1 for span in sample["spans"])
    if kind == "agents":
        assert metrics["rollout/episodes/streams/max"] == TURNS
