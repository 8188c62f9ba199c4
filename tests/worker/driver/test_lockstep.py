"""Devices of their own: the bits of Colocated at staleness 0; one update behind at 1.

What happens to such a job when something goes wrong: `test_fault_matrix.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from calm_runs import SAID, calm_run
from fault_rows import APART_SPEC as SPEC
from fault_rows import ROLLOUT, steps_of
from jobs import ONE_AND_ONE, REPOSITORY, events, final_state, manifest, run
from lane_sums import ENGINE, TRAINER, check_lanes
from support.run_bits import digest_of_trajectories
from support.samples import unless_drawn
from support.step_lines import read_steps
from support.trace_rules import check_trace

from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.records.trajectories import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = steps_of("lockstep")
alone = unless_drawn("left alone: lockstep")


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=unless_drawn(f"staleness 0: {mode}")) for mode in ("Disaggregated", "Async")]
)
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
    """The row of the fault matrix that nothing happened to."""
    return calm_run("lockstep", tmp_path_factory)


@alone
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


@alone
def test_phases_of_a_lane_fit_into_the_step_and_the_report_shows_them(calm: Path) -> None:
    check_lanes(read_steps(calm)[1:], {"trainer": TRAINER, "engine": ENGINE})
    check_trace(calm)
    assert (calm / "lanes.png").exists(), "the report shows both"
    said = (calm.parent / SAID).read_text()
    assert "engine: rollout" in said
    assert "batch_wait" in said


@alone
def test_generation_goes_on_while_the_trainers_train(calm: Path) -> None:
    """By the events' times: the next batch is begun before this step's training has ended."""
    told = [event for event in events(calm) if event["event"] == "phase"]
    of_engine = [event.get("lane") == "engine" for event in told]
    trainers = [event for event, other in zip(told, of_engine) if not other]
    rollouts = [event["time"] for event, own in zip(told, of_engine) if own and event["phase"] == "rollout"]
    training = [index for index, event in enumerate(trainers) if event["phase"] == "actor_train"]
    assert len(training) == len(rollouts) == STEPS
    # Two are generated in the first step; the one of step n + 1 is begun before step n has trained: the lanes begin at
    # once, and either may be first.
    assert all(began < trainers[index + 1]["time"] for began, index in zip(rollouts[1:], training))
    assert all(began > trainers[index]["time"] for began, index in zip(rollouts[2:], training))
