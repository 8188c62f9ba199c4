"""The chart on a real node, `kubectl apply`, real pods: one job from beginning to end, and its reports."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from dashboard_queries import dashboard_queries
from kube import wait_until
from node_jobs import RUN_SECONDS, NodeJob
from small_jobs import FINAL
from whole_system import NAMESPACE, SCRAPE_SECONDS, WholeSystem, printed_columns

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.timeout(1200)]

STEPS = 120
"""Enough that the operator that comes up after the second restart follows the job for a while: what a job did that has
ended before is not counted again."""
AFTER_SECONDS = 30.0
NO_DATA = {
    "rljob-fleet: Restarts A",
    "rljob-job: Restarts and lost work A",
    "rljob-job: Reward B",
    "rljob-job: Engines' seconds of a step A",
    "rljob-job: Nodes for engines A",
    "rljob-job: Environments A",
    "rljob-job: Environments B",
    "rljob-job: Failures of environments A",
}
"""The reward has no named parts, there are no environments, this job was not restarted (another of the fleet may have
been, a minute ago), and its
engines share devices: test_node_faults.py and test_node_async.py look at these. Nor may its nodes change in number:
tests/operator/metrics/test_exposition.py has such a job."""
HOURS = "rljob:"
"""Recorded series look hours back: tests/operator/metrics/rules has their tests."""


@dataclass(frozen=True)
class Told:
    """The job at its end, and what was seen of it while it ran."""

    job: NodeJob
    columns: list[dict[str, str]]
    restarts_of_the_operator: int
    empty_panels: set[str]


@pytest.fixture(scope="module")
def told(system: WholeSystem) -> Iterator[Told]:
    """One job; the operator's pod is deleted twice while it runs."""
    job = NodeJob(system, "first", f"steps={STEPS}", "checkpoint.everySteps=10").create()
    columns: list[dict[str, str]] = []
    restarts = 0
    queries = dashboard_queries("default", job.name, f"{60 * SCRAPE_SECONDS}s")
    empty = {panel for panel, query in queries.items() if HOURS not in query}
    deadline = time.monotonic() + RUN_SECONDS
    while job.status().get("phase") not in FINAL:
        assert time.monotonic() < deadline, job.describe()
        columns.append(printed_columns(system.cluster.kubectl("get", "rljob", job.name, "-o", "wide")))
        records = job.records()
        if restarts < 2 and len(records) > 10 * (restarts + 1):
            delete_the_operators_pod(system)
            restarts += 1
        empty = {panel for panel in empty if not system.query(queries[panel])}
        # Each look starts kubectl, and costs the job a part of a step.
        time.sleep(SCRAPE_SECONDS / 2)
    # What a rate needs two scrapes for may come after the last step of a job that was fast.
    ended = time.monotonic()
    while empty - NO_DATA and time.monotonic() < ended + AFTER_SECONDS:
        empty = {panel for panel in empty if not system.query(queries[panel])}
        time.sleep(0.5)
    yield Told(job, columns, restarts, empty)
    job.delete()


def delete_the_operators_pod(system: WholeSystem) -> None:
    for pod in system.operator_pods():
        system.kube.delete("Pod", NAMESPACE, pod["metadata"]["name"])


def test_it_succeeds_and_learns(told: Told) -> None:
    assert told.job.status()["phase"] == "Succeeded", told.job.describe()
    rewards = [record["metrics"]["rollout/raw_reward"] for record in told.job.records()]
    assert len(rewards) == STEPS
    # By half: ten standard errors of what 256 responses a step score by chance, however a processor rounds.
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])


def test_the_columns_were_filled_while_it_ran(told: Told) -> None:
    running = [row for row in told.columns if row["PHASE"] == "Running"]
    assert running, told.columns[-1]
    for column in ("STEP", "STEPS", "ETA", "REWARD", "STEP-SECONDS", "SLEEP", "UPDATE-WEIGHTS", "WAKE-UP", "SWITCH"):
        assert any(row[column] for row in running), f"{column}: {running}"
    steps = [int(row["STEP"]) for row in running if row["STEP"]]
    assert steps == sorted(steps)
    assert {row["RESTARTS"] for row in running} == {"0"}
    assert told.columns[-1]["PROFILE"] == "cpu"


def test_checkpoints_and_exported_weights_are_on_the_volume(told: Told, tmp_path: Path) -> None:
    saved = sorted(int(path.parent.name.removeprefix("step-"))
                   for path in told.job.run_folder.glob("checkpoints/step-*/driver.json"))  # fmt: skip
    assert saved == [STEPS - 10, STEPS]
    command = [sys.executable, "-m", "rljob_worker.cli.main", "export", str(told.job.run_folder)]
    command += ["--step", str(STEPS), "--to", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.model_type == "qwen3"
    assert sum(weight.numel() for weight in model.parameters()) > 100_000


def test_prometheus_counts_each_phase_of_each_step_once(told: Told, system: WholeSystem) -> None:
    assert told.restarts_of_the_operator == 2, "the job ended before the operator was restarted twice"
    wanted: dict[str, float] = defaultdict(float)
    for record in told.job.records():
        for phase, seconds in record["phases"].items():
            wanted[phase] += seconds
        wanted["other"] += record["other"]
    chosen = f'namespace="default", rljob="{told.job.name}"'

    def sums() -> dict[str, float]:
        found = system.query(f"sum by (phase) (rljob_phase_seconds_sum{{{chosen}}})")
        return {series["metric"]["phase"]: float(series["value"][1]) for series in found}

    def counted() -> float | None:
        return system.value(f"sum(rljob_step_seconds_count{{{chosen}}})")

    assert wait_until(lambda: counted() == STEPS, 30, 0.5), counted()
    found = {phase: seconds for phase, seconds in sums().items() if seconds}
    assert found == pytest.approx({phase: seconds for phase, seconds in wanted.items() if seconds}, rel=0.005)


def test_one_value_of_each_family_is_that_of_the_records(told: Told, system: WholeSystem) -> None:
    last = told.job.records()[-1]
    metrics = last["metrics"]
    wanted = {
        "rljob_step": STEPS,
        "rljob_target_steps": STEPS,
        "rljob_reward_mean": metrics["rollout/raw_reward"],
        "rljob_response_length_mean": metrics["rollout/response_len/mean"],
        "rljob_logprob_abs_diff": metrics["train/train_rollout_logprob_abs_diff"],
        "rljob_restarts_total": 0,
        'rljob_status_phase{phase="Succeeded"}': 1,
        "rljob_weights_sync_bytes": last["weights"]["bytes"],
        "rljob_devices": 1,
        "rljob_step_seconds_count": STEPS,
        "rljob_lost_steps_total": 0,
    }
    for series, value in wanted.items():
        name, _, rest = series.partition("{")
        labels = ", ".join(filter(None, [f'rljob="{told.job.name}"', rest.rstrip("}")]))
        found = system.value(f"sum({name}{{{labels}}})")
        assert found is not None, f"{name} is not there"
        assert found == pytest.approx(value, rel=1e-6), series


def test_every_query_of_the_dashboards_had_data(told: Told) -> None:
    assert told.empty_panels <= NO_DATA


def test_kubectl_rljob_tells_about_it(told: Told, system: WholeSystem) -> None:
    assert "Succeeded" in system.cluster.kubectl("rljob", "status", told.job.name)
    status = json.loads(system.cluster.kubectl("get", "rljob", told.job.name, "-o", "json"))["status"]
    assert status["progress"]["step"] == STEPS
    described = system.cluster.kubectl("describe", "rljob", told.job.name)
    assert "Succeeded" in described
