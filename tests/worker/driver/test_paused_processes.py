"""SIGSTOP: a pause changes no bit; one without end ends the run by name, and its resume saves what a calm run saved."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import alive, events, final_state, manifest, run, wait_for
from kill_chain import Chain
from support.run_bits import digest_of_trajectories
from support.samples import ALL, SEED
from support.step_lines import read_steps

from rljob_api.wire.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE = 8
"""Seconds for a phase, and for a reward to score one sample."""
PAUSES = [
    # process, phase, seconds; a driver may be away for longer than any deadline
    ("driver", "actor_train", DEADLINE + 1.5),
    ("trainer-0", "actor_train", 2.5),
    ("trainer-0", "update_weights", 2.5),
    ("engine-0", "rollout", 2.5),
    ("engine-0", "update_weights", 2.5),
    ("reward", "rollout", 2.5),
]
ENDS = {
    # process and phase of a pause without end: exit code, and what names it
    ("trainer-0", "actor_train"): (ExitCode.DEADLINE, "trainer-0 not finished after"),
    ("engine-0", "rollout"): (ExitCode.DEADLINE, "engine-0 not finished after"),
    ("reward", "rollout"): (ExitCode.FAILED, "reward.timeoutSeconds"),
    # Nobody on its machine can tell a stopped driver from a slow one: someone kills it.
    ("driver", "actor_train"): (-signal.SIGKILL, ""),
}
STOPPED = list(ENDS) if ALL else random.Random(SEED).sample(list(ENDS), 1)
APART = 4
STEPS = APART * (len(STOPPED) + 1) + len(PAUSES)
SPEC: dict[str, Any] = {
    "steps": STEPS,
    "checkpoint": {"everySteps": 2, "keep": STEPS},
    "timeouts": {"startSeconds": 240, "phaseSeconds": 60, "phases": {"actor_train": DEADLINE, "rollout": DEADLINE}},
}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("reward")
    (folder / "paused_reward.py").write_text("def score(response, **_):\n    return len(set(response)) % 3\n")
    reward = {"python": "paused_reward:score", "timeoutSeconds": DEADLINE}
    return {**SPEC, "reward": reward, "environment": {"pythonPath": [str(folder)]}}


@pytest.fixture(scope="module")
def calm(spec: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody stopped."""
    folder = tmp_path_factory.mktemp("calm")
    code, output = run("run", manifest(folder, **spec), "--output", folder / "run")
    assert code == 0, output
    return folder / "run"


@pytest.fixture(scope="module")
def chain(calm: Path, spec: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(tmp_path_factory.mktemp("chain"), calm, spec, apart=APART)


@pytest.mark.parametrize(("process", "phase"), STOPPED)
def test_who_is_stopped_for_good_is_named_at_the_deadline(process: str, phase: str, chain: Chain) -> None:
    print(f"RLJOB_SEED={SEED}: {process} is stopped in {phase}")
    step = chain.next_step()
    stall: dict[str, Any] = {"do": "stall", "process": process, "phase": phase, "step": step}
    killed = {"seconds": 2, "then": "KILL"} if process == "driver" else {}
    code, output = chain.go_on([stall | killed])
    stop = [event for event in events(chain.run_folder) if event["event"] == "kill"][-1]
    assert (stop["process"], stop["step"]) == (process, step - 1)
    wanted, name = ENDS[process, phase]
    assert code == wanted, output
    assert name in output, output
    assert chain.compare()
    wait_for(lambda: not alive(stop["pid"]), "end of the stopped process", 10)
    if wanted == ExitCode.DEADLINE:
        told = [event for event in events(chain.run_folder) if event["event"] == "deadline"][-1]
        assert set(told["engines"]) == {"engine-0"}
        assert bool(told["engines"]["engine-0"]) == (process == "engine-0" and phase == "rollout")
    if process == "trainer-0":
        stacks = (chain.run_folder / "logs" / "engine-0.stacks").read_text()
        assert stacks.strip(), "those that run write their stacks"


def test_a_run_whose_processes_are_all_stopped_for_a_while_goes_on(chain: Chain, calm: Path) -> None:
    first = chain.next_step()
    code, output = chain.go_on(
        [
            {"do": "stall", "process": process, "phase": phase, "step": first + number, "seconds": seconds}
            for number, (process, phase, seconds) in enumerate(PAUSES)
        ]
    )
    assert code == 0, output
    assert chain.compare()
    assert final_state(chain.run_folder) == final_state(calm)
    assert digest_of_trajectories(chain.run_folder) == digest_of_trajectories(calm)
    took = {record["step"]: record["step_seconds"] for record in read_steps(chain.run_folder)}
    for number, (process, phase, seconds) in enumerate(PAUSES):
        assert took[first + number] > 0.9 * seconds, f"{process} was not stopped in {phase}"
