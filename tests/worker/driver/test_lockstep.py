"""Devices of their own: the bits of Colocated at staleness 0; one update behind at 1, and the same after kills."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import ONE_AND_ONE, REPOSITORY, events, final_state, manifest, run
from kill_chain import Chain
from lane_sums import check_lanes
from support.run_bits import digest_of_trajectories
from support.samples import ALL, unless_all
from support.step_lines import read_steps
from support.trace_rules import check_trace

from rljob_api.wire.exit_codes import ExitCode
from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.records.trajectories import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAINER = {"batch_wait", "ref_log_probs", "log_probs", "actor_train", "update_weights", "checkpoint"}
ENGINE = {"rollout", "reward_wait", "admission_wait", "update_weights", "eval"}
SPEC: dict[str, Any] = {
    "algorithm": {"name": "grpo", "kl": {"coefficient": 0.01}},
    "training": {"precision": "fp32", "globalBatchSize": 8, "optimizer": {"lr": 1.0e-3}},
    "evaluation": {"everySteps": 2, "atStart": True, "maxPrompts": 2, "data": {"synthetic": {"rows": 8, "seed": 5}}},
}
ROLLOUT = {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 4, "ignoreEos": True}
ON_TWO = {"profile": "cpu", "trainer": {"devicesPerNode": 2}, "rollout": {"devicesPerNode": 1}, "threadsPerDevice": 1}

# Process, phase, and about how long the phase takes: the kill comes at a random instant within.
KILLS = [
    *((process, "actor_train", 0.04) for process in ("driver", "trainer-1", "engine-0")),
    *((process, "update_weights", 0.005) for process in ("driver", "trainer-0", "engine-0")),
    ("driver", "rollout", 0.05),
    ("engine-0", "rollout", 0.05),
    ("driver", "reward_wait", 0.0),
    ("driver", "admission_wait", 0.01),
    ("driver", "batch_wait", 0.02),
    ("driver", "checkpoint", 0.01),
    ("trainer-0", "checkpoint", 0.01),
    ("driver", "eval", 0.0),
    ("engine-0", "eval", 0.0),
]
CHOSEN = KILLS if ALL else [("driver", "actor_train", 0.04)]
APART = 4
STEPS = APART * (len(CHOSEN) + (3 if ALL else 2))
DEADLINE = 6
AHEAD: dict[str, Any] = {
    **SPEC,
    "steps": STEPS,
    "mode": "Disaggregated",
    "rollout": {**ROLLOUT, "staleness": {"max": 1}},
    "resources": ON_TWO,
    "checkpoint": {"everySteps": 2, "keep": STEPS},
    "timeouts": {"startSeconds": 240, "phaseSeconds": 60, "phases": {"rollout": DEADLINE}},
}


@pytest.mark.parametrize("mode", ["Disaggregated", "Async"])
def test_staleness_0_has_the_bits_of_colocated(mode: str, together: Path, tmp_path: Path) -> None:
    apart = _run_on_few_prompts(tmp_path, mode, {**ROLLOUT, "staleness": {"max": 0}}, ONE_AND_ONE)
    assert final_state(apart) == final_state(together)
    assert digest_of_trajectories(apart) == digest_of_trajectories(together)
    for mine, other in zip(read_steps(apart), read_steps(together), strict=True):
        for name, value in other["metrics"].items():
            if not name.startswith("perf/"):
                assert mine["metrics"][name] == value, (mine["step"], name)
        assert mine.get("prompts") == other.get("prompts")
        assert mine["switch_seconds"] == mine["phases"].get("update_weights", 0.0), "nobody slept"


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shared = {"profile": "cpu", "devicesPerNode": 1, "threadsPerDevice": 1}
    return _run_on_few_prompts(tmp_path_factory.mktemp("together"), "Colocated", ROLLOUT, shared)


def _run_on_few_prompts(folder: Path, mode: str, rollout: dict[str, Any], resources: dict[str, Any]) -> Path:
    """The same four prompts in each step, longer than a block of the KV cache: what an engine remembers of them under
    the weights before would change their tokens."""
    model = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())["spec"]["model"]
    model["random"]["config"].update(hidden_size=64, intermediate_size=128)
    data = {"synthetic": {"rows": 4, "promptSymbols": 300, "answerSymbols": 4}}
    job = manifest(folder, **SPEC, steps=4, model=model, data=data, mode=mode, rollout=rollout, resources=resources)
    code, output = run("run", job, "--output", folder / "run")
    assert code == 0, output
    return folder / "run"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody harmed, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("ahead")
    job = manifest(folder, **{**AHEAD, "checkpoint": {"everySteps": 1, "keep": STEPS}})
    code, output = run("run", job, "--output", folder / "run", report=True)
    assert code == 0, output
    (folder / "said").write_text(output)
    return folder / "run"


def test_every_sample_is_of_the_weights_before_and_no_older(calm: Path) -> None:
    for record in read_steps(calm)[1:]:
        step, metrics = record["step"], record["metrics"]
        lag = 0 if step == 1 else 1
        assert (metrics["rollout/staleness/mean"], metrics["rollout/staleness/max"]) == (lag, lag)
        # Version n is what step n leads to: step n begins with n - 1, and its samples are one older than that.
        versions = {span["version"] for sample in read_trajectories(calm, step)[1] for span in sample["spans"]}
        assert versions == {step - 1 - lag}
        assert record["weights"]["version"] == step
        open_ = sum(last - first for first, last in record["prompts"]["open"])
        assert open_ == (0 if step == STEPS else 4), "the batch made ahead"
    checkpoints = Checkpoints(calm / "checkpoints")
    kept = {step: checkpoints.read(step) for step in checkpoints.complete_steps()}
    for step, state in kept.items():
        assert len(state.carried) == (0 if step == STEPS else 4)
        assert [one["ordinal"] for one in state.carried] == state.data_cursor["ledger"]["open"]


def test_each_lane_adds_up_to_the_step(calm: Path) -> None:
    others = check_lanes(read_steps(calm)[1:], {"trainer": TRAINER, "engine": ENGINE})
    assert max(others.values()) <= 1.0, others
    check_trace(calm)
    assert (calm / "lanes.png").exists(), "the report shows both"
    said = (calm.parent / "said").read_text()
    assert "engine: rollout" in said
    assert "batch_wait" in said


def test_generation_goes_on_while_the_trainers_train(calm: Path) -> None:
    """By the events' times: the next batch is begun before this step's training has ended."""
    told = [event for event in events(calm) if event["event"] == "phase"]
    training = [event["time"] for event in told if event["phase"] == "actor_train"]
    rollouts = [event["time"] for event in told if event["phase"] == "rollout" and event.get("lane") == "engine"]
    assert len(training) == len(rollouts) == STEPS
    # Two are generated in the first step; the one of step n + 1 is begun before step n trains.
    assert all(began < trained for began, trained in zip(rollouts[1:], training))
    assert all(began > trained for began, trained in zip(rollouts[2:], training))


@pytest.fixture(scope="module")
def chain(calm: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(tmp_path_factory.mktemp("chain"), calm, AHEAD, ranks=2, apart=APART)


@pytest.mark.parametrize(("process", "phase", "lasts"), CHOSEN)
def test_a_run_that_was_killed_saves_what_the_calm_run_saved(
    process: str, phase: str, lasts: float, chain: Chain
) -> None:
    chance = random.Random(f"{process}/{phase}")
    kill, output = chain.kill(process, phase, chance.uniform(0.0, lasts))
    print(f"{process} killed in {kill['alive']}")
    if process != "driver":
        assert f"{process} died" in output, output
    assert chain.compare(), "this start should have saved a checkpoint of its own"


@unless_all("starts a job of its own")
def test_a_lane_that_hangs_is_named_at_its_deadline(chain: Chain) -> None:
    fault = {"do": "stall", "process": "engine-0", "phase": "rollout", "step": chain.next_step()}
    code, output = chain.go_on([fault])
    assert code == ExitCode.DEADLINE, output
    assert f"rollout: engine-0 not finished after {DEADLINE} s" in output
    assert (chain.run_folder / "logs" / "trainer-0.stacks").read_text().strip(), "those that run write their stacks"
    assert chain.compare()


def test_a_stop_while_both_sides_work_and_the_end_are_those_of_the_calm_run(chain: Chain, calm: Path) -> None:
    step = chain.next_step()
    fault = {"do": "kill", "signal": signal.SIGTERM, "process": "driver", "phase": "actor_train", "step": step}
    code, output = chain.go_on([fault])
    assert code == ExitCode.STOPPED, output
    chain.go_on_to_the_end()
    assert chain.compare()
    assert final_state(chain.run_folder, 2) == final_state(calm, 2)
    assert digest_of_trajectories(chain.run_folder) == digest_of_trajectories(calm)
    for folder in (calm, chain.run_folder):
        code, output = run("audit", folder)
        assert code == 0, output
    assert read_steps(chain.run_folder)[-1]["prompts"] == read_steps(calm)[-1]["prompts"]
