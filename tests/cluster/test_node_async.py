"""Trainers and engines in pods of their own on the real node: both lanes; engines' pods that are lost, go and come."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest
from dashboard_queries import dashboard_queries
from kube import Object, wait_until
from node_jobs import START_SECONDS, NodeJob
from support.samples import unless_drawn
from whole_system import WholeSystem

from rljob_api.quantities import to_cores
from rljob_worker.records.event_lines import read_events
from rljob_worker.records.event_names import ENGINE_JOINED, ENGINE_LEFT, ENGINE_LOST

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.node,
    pytest.mark.timeout(1800),
    unless_drawn("a node: engines' pods"),
]

LOST_AFTER, PROMPTS = 6, 32
REWARD_SECONDS = 3.0
"""Three steps are on their way at once."""


@pytest.fixture(scope="module")
def job(system: WholeSystem) -> Iterator[NodeJob]:
    """One that asks for three pods of engines on a node with room for two, and then for two: one is deleted, then
    there is one fewer, then two again."""
    [node] = system.kube.list("Node")
    room = to_cores(node["status"]["allocatable"]["cpu"]) * 1000
    job = NodeJob(
        system,
        "async",
        "mode=Async",
        "rollout.staleness={max: 2}",
        "checkpoint.everySteps=5",
        "resources.nodes=1",
        "resources.devicesPerNode=null",
        "resources.trainer={nodes: 1, worker: {cpu: 400m, memory: 4Gi}}",
        f"resources.rollout={{nodes: 3, maxNodes: 3, worker: {{cpu: {(room - 1000) // 2}m, memory: 4Gi}}}}",
        # There is one node.
        "pods.worker={spec: {affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: []}}}}",
    ).going_on(REWARD_SECONDS)
    job.create()
    try:
        job.wait_step(LOST_AFTER)
        assert sorted(phases(job)) == ["Pending", "Running", "Running"], job.describe()
        scale(job, 2)
        assert wait_until(lambda: phases(job) == ["Running", "Running"], 60, 0.5), job.describe()
        assert changes(job) == []
        job.kube.delete("Pod", "default", engine_pods(job)[1]["metadata"]["name"])
        assert wait_until(lambda: changes(job) == [ENGINE_LOST, ENGINE_JOINED], START_SECONDS, 0.5), job.describe()
        scale(job, 1)
        assert wait_until(lambda: len(engine_pods(job)) == 1, 120, 0.5), job.describe()
        scale(job, 2)
        assert wait_until(lambda: changes(job)[3:] == [ENGINE_JOINED], START_SECONDS, 0.5), job.describe()
        # The status is written seldom: what it says may be less than what is done.
        job.change({"steps": len(job.records()) + 5})
        job.wait("Succeeded")
        yield job
    finally:
        job.delete()


def scale(job: NodeJob, nodes: int) -> None:
    job.system.cluster.kubectl("scale", "rljob", job.name, "--namespace=default", f"--replicas={nodes}")


def engine_pods(job: NodeJob) -> list[Object]:
    return [pod for pod in job.pods("worker") if pod["metadata"]["labels"]["ray.io/group"] == "engines"]


def phases(job: NodeJob) -> list[str]:
    return [pod["status"]["phase"] for pod in engine_pods(job)]


def changes(job: NodeJob) -> list[str]:
    """Events of engines, in order."""
    return [one["event"] for one in read_events(job.run_folder) if one["event"].startswith("engine_")]


def test_pods_that_are_lost_go_and_come_are_no_restart(job: NodeJob) -> None:
    status = job.status()
    records = job.records()
    assert (status["phase"], status["progress"]["step"]) == ("Succeeded", len(records)), job.describe()
    assert {record["attempt"] for record in records} == {1}
    assert changes(job) == [ENGINE_LOST, ENGINE_JOINED, ENGINE_LEFT, ENGINE_JOINED]
    at = [one["step"] for one in read_events(job.run_folder) if one["event"].startswith("engine_")]
    assert LOST_AFTER <= at[0] < at[1] <= at[2] < at[3] < len(records)


def test_engines_after_the_first_find_what_it_knew_of_the_model(job: NodeJob) -> None:
    assert list(job.run_folder.parent.glob(".cache-*/vllm/modelinfos/*.json"))


def test_each_prompt_was_taken_once(job: NodeJob) -> None:
    command = [sys.executable, "-m", "rljob_worker.cli.main", "audit", str(job.run_folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(job.records()) * PROMPTS} trained, 0 filtered, " in done.stdout
    assert "; each exactly once" in done.stdout
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
    panel = dashboard_queries("default", job.name, "10m")["rljob-job: Engines' seconds of a step A"]
    assert {series["metric"]["phase"] for series in system.query(panel)} >= {"rollout", "update_weights"}
    found = {}
    for family, lane in (("rljob_phase_seconds_sum", "trainer"), ("rljob_lane_phase_seconds_sum", "engine")):
        for series in system.query(f"sum by (phase) ({family}{{{chosen}}})"):
            found[lane, series["metric"]["phase"]] = float(series["value"][1])
    assert {key: seconds for key, seconds in found.items() if seconds} == pytest.approx(
        {key: seconds for key, seconds in wanted.items() if seconds}, rel=0.005, abs=1e-6
    )
