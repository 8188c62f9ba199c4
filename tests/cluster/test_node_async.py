"""Trainers and engines in pods of their own on the real node: both lanes, and a pod of engines that is lost."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest
from kube import wait_until
from node_jobs import NodeJob
from whole_system import WholeSystem

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.timeout(1200)]

STEPS, LOST_AFTER, PROMPTS = 60, 12, 32


@pytest.fixture(scope="module")
def job(system: WholeSystem) -> Iterator[NodeJob]:
    """One whose engine's pod is deleted while it runs."""
    job = NodeJob(
        system,
        "async",
        f"steps={STEPS}",
        "mode=Async",
        "rollout.staleness={max: 2}",
        "checkpoint.everySteps=5",
        "resources.nodes=1",
        "resources.devicesPerNode=null",
        "resources.trainer={nodes: 1}",
        "resources.rollout={nodes: 1}",
    ).create()
    try:
        job.wait_step(LOST_AFTER)
        groups = {pod["metadata"]["labels"]["ray.io/group"]: pod["metadata"]["name"] for pod in job.pods("worker")}
        assert groups.keys() == {"trainers", "engines"}
        job.kube.delete("Pod", "default", groups["engines"])
        job.wait("Succeeded")
        yield job
    finally:
        job.delete()


def test_it_succeeds_and_takes_each_prompt_once_over_the_loss_of_its_pod(job: NodeJob) -> None:
    status = job.status()
    assert (status["phase"], status["progress"]["step"]) == ("Succeeded", STEPS), job.describe()
    assert {record["attempt"] for record in job.records()} == {1, 2}
    command = [sys.executable, "-m", "rljob_worker.cli.main", "audit", str(job.run_folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{STEPS * PROMPTS} trained, 0 filtered, 0 open; each exactly once" in done.stdout
    assert max(record["metrics"]["rollout/staleness/max"] for record in job.records()) in (1, 2)


def test_prometheus_has_the_records_lane_by_lane(job: NodeJob, system: WholeSystem) -> None:
    wanted: dict[tuple[str, str], float] = defaultdict(float)
    for record in job.records():
        for phase, seconds in {**record["phases"], "other": record["other"]}.items():
            wanted["trainer", phase] += seconds
        engine = record["lanes"]["engine"]
        for phase, seconds in {**engine, "other": record["step_seconds"] - sum(engine.values())}.items():
            wanted["engine", phase] += seconds
    chosen = f'namespace="default", rljob="{job.name}"'
    executed = len(job.records())
    counted = f"sum(rljob_step_seconds_count{{{chosen}}})"
    assert wait_until(lambda: system.value(counted) == executed, 30, 0.5), system.value(counted)
    found = {}
    for family, lane in (("rljob_phase_seconds_sum", "trainer"), ("rljob_lane_phase_seconds_sum", "engine")):
        for series in system.query(f"sum by (phase) ({family}{{{chosen}}})"):
            found[lane, series["metric"]["phase"]] = float(series["value"][1])
    assert {key: seconds for key, seconds in found.items() if seconds} == pytest.approx(
        {key: seconds for key, seconds in wanted.items() if seconds}, rel=0.005, abs=1e-6
    )
