"""kill -9 of any process in any phase, then --resume: the final state is that of the run that was never killed."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from jobs import alive, events, final_state, finish, manifest, run, start_faulty, wait_for

from rljob_worker.records.steps import read_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROCESSES = ("driver", "trainer-0", "engine-0")
PHASES = {
    # phase: about how long it takes in this job, in seconds; the kill comes at a random instant within
    "rollout": 0.03,
    "reward": 0.0,
    "rollout_sleep": 0.002,
    "wake_up": 0.001,
    "ref_log_probs": 0.01,
    "log_probs": 0.01,
    "actor_train": 0.04,
    "checkpoint": 0.005,
    "rollout_wake_weights": 0.001,
    "update_weights": 0.01,
    "sleep": 0.001,
    "rollout_wake_kv": 0.001,
    "eval": 0.01,
}
SIX = [
    ("driver", "actor_train"),
    ("driver", "checkpoint"),
    ("trainer-0", "update_weights"),
    ("trainer-0", "log_probs"),
    ("engine-0", "rollout"),
    ("engine-0", "update_weights"),
]
PAIRS = [(p, phase) for p in PROCESSES for phase in PHASES] if os.environ.get("RLJOB_FAULTS") == "all" else SIX
ATTEMPTS = 5

SPEC = {
    "algorithm": {"name": "grpo", "kl": {"coefficient": 0.01}},
    "training": {"precision": "fp32", "globalBatchSize": 8, "optimizer": {"lr": 1.0e-3, "schedule": "linear"}},
    "evaluation": {"everySteps": 2, "maxPrompts": 2, "data": {"synthetic": {"rows": 8, "seed": 5}}},
}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """State at the end of the uninterrupted run."""
    folder = tmp_path_factory.mktemp("calm")
    code, output = run("run", manifest(folder, **SPEC), "--output", folder / "run")
    assert code == 0, output
    return final_state(folder / "run")


@pytest.mark.parametrize(("process", "phase"), PAIRS)
def test_killed_run_resumes_to_the_same_state(process: str, phase: str, calm: dict[str, str], tmp_path: Path) -> None:
    chance = random.Random(f"{process}/{phase}")
    for attempt in range(ATTEMPTS):
        folder = tmp_path / f"attempt-{attempt}"
        folder.mkdir()
        job = manifest(folder, **SPEC)
        fault = {
            "do": "kill",
            "process": process,
            "phase": phase,
            "step": 4,
            "delay": chance.uniform(0.0, PHASES[phase]),
        }
        started = time.monotonic()
        code, output = finish(start_faulty(job, folder / "run", fault))
        assert code != 0, output
        kill = next(event for event in events(folder / "run") if event["event"] == "kill")
        if kill["alive"] == phase:
            break
    else:
        pytest.fail(f"no kill in {ATTEMPTS} hit {phase}: the last hit {kill['alive']}")
    if process != "driver":
        assert time.time() - kill["time"] < 60 + 30, "past the phase deadline"
        assert f"{process} died" in output, output
    print(f"{process} killed in {kill['alive']} of step 4 after {time.monotonic() - started:.1f} s")

    code, output = run("run", job, "--output", folder / "run", "--resume")
    assert code == 0, output
    assert final_state(folder / "run") == calm
    evaluated = {
        r["step"] for r in read_steps(folder / "run") if any(name.startswith("eval/") for name in r["metrics"])
    }
    assert evaluated == {2, 4, 6}, "no evaluation is lost"


def test_no_process_survives_the_driver(tmp_path: Path) -> None:
    job = manifest(tmp_path, steps=100000)
    process = start_faulty(job, tmp_path / "run", {"do": "none", "step": 0})
    logs = tmp_path / "run" / "logs"
    wait_for(lambda: any(e["event"] == "ready" for e in events(tmp_path / "run")), "ready")
    children = _descendants(process.pid)
    assert len(children) >= 4, "Ray, trainer and engine should be running"
    process.kill()
    finish(process)
    wait_for(lambda: not any(map(alive, children)), f"end of {children}", 20)
    assert sorted(path.name for path in logs.glob("*.log")) == ["engine-0.log", "trainer-0.log"]


def _descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]
