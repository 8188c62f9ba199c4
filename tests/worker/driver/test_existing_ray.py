"""Jobs on a Ray cluster that is already there: submitted, stopped and resumed over Ray's job API."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import events, final_state, manifest, run, wait_for
from ray_cluster import RayCluster, ray_cluster, resources
from support.samples import unless_drawn
from support.step_lines import read_steps

from rljob_api.wire.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), unless_drawn("an existing Ray of two nodes")]

STEPS = 40
NODES = ("127.0.0.2", "127.0.0.3")
NEW_NODE, BLIND_NODE = "127.0.0.4", "127.0.0.5"
SPEC: dict[str, Any] = {
    "steps": STEPS,
    "checkpoint": {"everySteps": 10, "keep": 2},
    "records": {"httpPort": 0, "lingerSeconds": 0, "tensorboard": False},
}
SAME = (
    "rollout/raw_reward",
    "rollout/response_len/mean",
    "train/loss",
    "train/grad_norm",
    "train/train_rollout_logprob_abs_diff",
)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job on this machine alone, with two devices."""
    folder = tmp_path_factory.mktemp("embedded")
    code, output = run("run", manifest(folder, **SPEC, resources=resources(1, 2)), "--output", folder / "run")
    assert code == 0, output
    return folder / "run"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("cluster"), dict.fromkeys(NODES, 1)) as made:
        yield made


def failed(cluster: RayCluster, submission: str, seconds: float = 120) -> tuple[int, str]:
    info = cluster.end_of(submission, seconds)
    assert info["status"] == "FAILED", cluster.logs(submission)
    return info["driver_exit_code"], cluster.logs(submission)


def test_too_few_nodes_are_waited_for_and_listed(cluster: RayCluster, tmp_path: Path) -> None:
    timeouts = {"startSeconds": 3, "phaseSeconds": 60}
    job = manifest(tmp_path, **SPEC, resources=resources(2, 2), timeouts=timeouts)
    cluster.submit(job, tmp_path / "run", "large")
    code, logs = failed(cluster, "large")
    assert code == ExitCode.FAILED
    assert "2 nodes with 2 free CPUs each (spec.resources) were not to be had within 3 s" in logs
    assert all(f"({address}) with 1 CPUs" in logs for address in NODES)


def test_stopped_killed_and_finished_on_two_nodes_like_one_run_on_this_machine(
    cluster: RayCluster, embedded: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = manifest(tmp_path, **SPEC, resources=resources(2, 1))

    cluster.submit(job, folder, "job-0")
    wait_for(lambda: newest_step(folder) >= 2, "two steps", 200)
    cluster.stop("job-0")
    assert cluster.end_of("job-0", 60)["status"] == "STOPPED"
    assert cluster.exit_codes()[-1] == ExitCode.STOPPED, cluster.logs("job-0")
    stopped_after = newest_step(folder)
    saved = int(re.findall(r"saved step-(\d+)", cluster.logs("job-0"))[-1])
    # A stop that comes after a step's last update leaves its record to whoever continues.
    assert saved in (stopped_after, stopped_after + 1)
    assert saved < STEPS

    cluster.submit(job, folder, "job-1")
    wait_for(lambda: newest_step(folder) >= saved + 2, "two more steps", 200)
    cluster.kill_node(NODES[1])
    code, logs = failed(cluster, "job-1")
    assert code == ExitCode.FAILED
    assert f"({NODES[1]}), which does not answer any more" in logs, logs
    assert newest_step(folder) < STEPS

    cluster.wait_for_loss(NODES[1])
    cluster.add_node(NEW_NODE, cpus=1)
    name, info = end_of_a_started(cluster, job, folder, "job-2")
    assert (info["status"], info["driver_exit_code"]) == ("SUCCEEDED", 0), f"{info}\n{cluster.logs(name)}"
    assert {row["node_ip"] for row in cluster.alive("nodes")} > {NODES[0], NEW_NODE}, "the cluster is left as it was"
    wait_for(lambda: not cluster.alive("actors"), "end of the job's actors", 30)

    assert final_state(folder, ranks=2) == final_state(embedded, ranks=2)
    expected = {record["step"]: record for record in read_steps(embedded)}
    records = read_steps(folder)
    assert {record["step"] for record in records} == set(expected)
    for record in records:
        same = expected[record["step"]]
        assert [record["metrics"][name] for name in SAME] == [same["metrics"][name] for name in SAME]
        assert record["weights"]["verified"]
        assert record["weights"]["bytes"] == same["weights"]["bytes"]
    attempts = {record["attempt"] for record in records}
    assert attempts == {1, 2, 3}
    restored = [event["restored"] for event in events(folder) if event["event"] == "ready"]
    assert restored[:2] == [0, saved], "a clean stop loses nothing"


def test_a_node_that_does_not_see_the_run_folder_is_named(cluster: RayCluster, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    cluster.add_node(BLIND_NODE, cpus=2, hide=folder)
    job = manifest(tmp_path, **SPEC, resources=resources(1, 2))
    name, info = end_of_a_started(cluster, job, folder / "run", "unseen")
    logs = cluster.logs(name)
    assert (info["status"], info["driver_exit_code"]) == ("FAILED", ExitCode.USER_ERROR), f"{info}\n{logs}"
    assert f"({BLIND_NODE}) does not see the model of the driver at {folder}/run/model" in logs
    assert "a volume that all pods mount at the same path (spec.storage.volumes)" in logs
    assert not list(folder.rglob(".seen-*"))


def end_of_a_started(cluster: RayCluster, job: Path, folder: Path, name: str) -> tuple[str, dict[str, Any]]:
    """Submit until the driver was started: for a while Ray may hand a new job's supervisor to a node that is lost, or
    to one that only just came, with which it fails."""
    for attempt in range(4):
        submission = f"{name}-{attempt}"
        cluster.submit(job, folder, submission)
        info = cluster.end_of(submission, 200)
        if info["driver_exit_code"] is not None:
            break
        time.sleep(3)
    return submission, info


def newest_step(folder: Path) -> int:
    """The newest step that has a record."""
    if not (folder / "steps.jsonl").exists():
        return 0
    return max((record["step"] for record in read_steps(folder)), default=0)
