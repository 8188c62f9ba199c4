"""kill -9 of any process in any phase, then --resume: each checkpoint is that of the run that was never killed."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from jobs import alive, events, final_state, finish, manifest, run, start_faulty, wait_for
from kill_chain import Chain
from support.samples import ALL, SEED
from support.step_lines import read_steps
from support.trace_rules import check_trace

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
PAIRS = [(p, phase) for p in PROCESSES for phase in PHASES] if ALL else random.Random(SEED).sample(SIX, 3)
ATTEMPTS = 5
APART = 4
"""Steps between two kills: a checkpoint and an evaluation are due at each second step, so that every resumed run has
saved one of its own before the next kill."""
STEPS = 2 * APART * len(PAIRS)
"""Room for kills that hit another phase than the one meant and are tried again."""

SPEC = {
    "steps": STEPS,
    "algorithm": {"name": "grpo", "kl": {"coefficient": 0.01}},
    "training": {"precision": "fp32", "globalBatchSize": 8, "optimizer": {"lr": 1.0e-3, "schedule": "linear"}},
    "checkpoint": {"everySteps": 2, "keep": STEPS},
    "rollout": {
        "promptsPerStep": 4,
        "samplesPerPrompt": 4,
        "maxResponseTokens": 4,
        "ignoreEos": True,
        "oversampling": {"filter": "ZeroVariance", "factor": 1.5, "limit": 50},
    },
    "evaluation": {"everySteps": 2, "maxPrompts": 2, "data": {"synthetic": {"rows": 8, "seed": 5}}},
}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("calm")
    code, output = run("run", manifest(folder, **SPEC), "--output", folder / "run")
    assert code == 0, output
    return folder / "run"


@pytest.fixture(scope="module")
def chain(calm: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(tmp_path_factory.mktemp("chain"), calm, SPEC, apart=APART)


@pytest.mark.parametrize(("process", "phase"), PAIRS)
def test_a_run_that_was_killed_saves_what_the_calm_run_saved(process: str, phase: str, chain: Chain) -> None:
    chance = random.Random(f"{process}/{phase}")
    for _ in range(ATTEMPTS):
        started = time.monotonic()
        kill, output = chain.kill(process, phase, chance.uniform(0.0, PHASES[phase]))
        if process != "driver":
            assert time.time() - kill["time"] < 60 + 30, "past the phase deadline"
            assert f"{process} died" in output, output
        assert chain.compare(), "this start should have saved a checkpoint of its own"
        if kill["alive"] == phase:
            break
    else:
        pytest.fail(f"no kill in {ATTEMPTS} hit {phase}: the last hit {kill['alive']}")
    print(f"{process} killed in {kill['alive']} of step {kill['step'] + 1} after {time.monotonic() - started:.1f} s")


def test_a_run_that_was_killed_often_ends_as_the_calm_run(chain: Chain, calm: Path) -> None:
    chain.go_on_to_the_end()
    assert chain.compare()
    assert "killed, or lost" in {event["name"] for event in check_trace(chain.run_folder)}
    assert final_state(chain.run_folder) == final_state(calm)
    for folder in (calm, chain.run_folder):
        code, output = run("audit", folder)
        assert code == 0, output
    last = read_steps(calm)[-1]["prompts"]
    assert read_steps(chain.run_folder)[-1]["prompts"] == last
    metrics = [record["metrics"] for record in read_steps(calm)]
    assert any(m["rollout/filtered_groups"] for m in metrics), "nothing was filtered"
    assert any(m["rollout/surplus_groups"] for m in metrics), "nothing was sampled again"
    assert any(m["rollout/rounds"] > 1 for m in metrics), "one round was always enough"
    evaluated = {
        record["step"]
        for record in read_steps(chain.run_folder)
        if any(name.startswith("eval/") for name in record["metrics"])
    }
    assert evaluated == set(range(2, STEPS + 1, 2)), "no evaluation is lost"


def test_no_process_survives_the_driver(tmp_path: Path) -> None:
    job = manifest(tmp_path, steps=100000)
    process = start_faulty(job, tmp_path / "run", {"do": "none", "step": 0}, cold=True)
    logs = tmp_path / "run" / "logs"
    wait_for(lambda: any(e["event"] == "ready" for e in events(tmp_path / "run")), "ready")
    children = _descendants(process.pid)
    assert len(children) >= 4, "Ray, trainer and engine should be running"
    slots = [slot for child in children for slot in Path("/dev/shm").glob(f"rljob-*-*-{child}-*-*")]
    assert len(slots) == 2, "those of the trainer"
    process.kill()
    finish(process)
    try:
        wait_for(lambda: not any(map(alive, children)), f"end of {children}", 20)
    except AssertionError:
        # What it is, and what it waits for, is gone when the test is over.
        left = {child: Path(f"/proc/{child}/status").read_text() for child in children if alive(child)}
        raise AssertionError(f"they survived: {left}") from None
    wait_for(lambda: not any(slot.exists() for slot in slots), f"end of {slots}", 20)
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
