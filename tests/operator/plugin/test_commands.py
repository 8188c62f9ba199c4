from __future__ import annotations

import base64
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from plugin_api import API_TOKEN, RAY_TOKEN, FakeApi, FakeRay
from plugin_worlds import NAME, NOW, manifest
from support.trace_rules import lanes_of, read_strictly

from rljob_api.wire.driver_status import DriverStatus
from rljob_api.wire.names import DASHBOARD_PORT, DRIVER_PORT
from rljob_api.wire.step_record import StepRecord
from rljob_operator.plugin import commands, logs
from rljob_operator.plugin.main import main
from rljob_worker.records import http as driver_http
from rljob_worker.records.event_lines import read_events
from rljob_worker.records.http import DriverServer
from rljob_worker.records.profile_request import BusyError, ProfileRequest
from rljob_worker.records.steps import StepLog, read_steps
from rljob_worker.report.trace import trace_of

UID = "0f3c9a52-6c1e-4a53-9d0b-0d8a3c1f7a11"
CLUSTER_UID = "8b0f8c8e-53a3-4d0c-a0c4-c3b7d8a7e3c5"
HEAD = f"{NAME}-head-4tk2x"
WORKER = f"{NAME}-workers-worker-7qv8d"
SUBMISSION = f"rljob-{UID}-0"
DRIVER_TOKEN = "driver-token"
OWNER = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "name": NAME, "uid": UID, "controller": True}
OF_CLUSTER = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": NAME, "uid": CLUSTER_UID, "controller": True}

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def api() -> Iterator[FakeApi]:
    server = FakeApi()
    yield server
    server.close()


@pytest.fixture
def run(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(commands.time, "time", lambda: NOW)
    monkeypatch.setattr(logs, "_LOOK_SECONDS", 0.2)

    def command(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return command


def rljob(status: dict[str, Any] | None = None, name: str = NAME, namespace: str = "rl", **spec: Any) -> dict[str, Any]:
    item = manifest(**spec)
    item["metadata"] = {
        "name": name,
        "namespace": namespace,
        "uid": UID,
        "generation": 1,
        "creationTimestamp": "2027-01-15T05:00:00Z",
    }
    return {**item, "status": status or {}}


def running() -> dict[str, Any]:
    return {
        "phase": "Running",
        "attempt": 0,
        "progress": {
            "step": 12,
            "steps": 300,
            "eta": "4h10m",
            "stepSeconds": 52.0,
            "rewardMean": 0.412,
            "lastStep": {
                "step": 12,
                "seconds": 52.4,
                "phaseSeconds": {"rollout": 31.0, "actor_train": 12.0, "sleep": 0.5},
            },
        },
        "attempts": [{"number": 0, "submissionId": SUBMISSION, "startTime": "2027-01-15T07:30:00Z", "startStep": 0}],
    }


def ray_cluster(**status: Any) -> dict[str, Any]:
    ready = [{"type": kind, "status": "True"} for kind in ("RayClusterProvisioned", "HeadPodReady")]
    return {
        "metadata": {
            "name": NAME,
            "namespace": "rl",
            "uid": CLUSTER_UID,
            "generation": 1,
            "creationTimestamp": "2027-01-15T05:00:05Z",
            "ownerReferences": [OWNER],
        },
        "spec": {"authOptions": {"mode": "token"}},
        "status": {
            "observedGeneration": 1,
            "desiredWorkerReplicas": 2,
            "readyWorkerReplicas": 2,
            "head": {"podName": HEAD, "serviceName": f"{NAME}-head-svc"},
            "conditions": ready,
            **status,
        },
    }


def pod(name: str, **status: Any) -> dict[str, Any]:
    role = "head" if "head" in name else "worker"
    labels = {"ray.io/cluster": NAME, "ray.io/node-type": role, "rljob.dev/job": NAME}
    meta = {"name": name, "namespace": "rl", "uid": name, "labels": labels, "ownerReferences": [OF_CLUSTER]}
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": meta, "spec": {"nodeName": "n1"}, "status": status or ready}


def secret(name: str, key: str, value: str, owner: dict[str, Any] = OWNER) -> dict[str, Any]:
    data = {key: base64.b64encode(value.encode()).decode()}
    return {"metadata": {"name": name, "namespace": "rl", "ownerReferences": [owner]}, "data": data}


@pytest.fixture
def world(api: FakeApi) -> FakeApi:
    """A job that runs."""
    api.add("rljobs", rljob(running()))
    api.add("rayclusters", ray_cluster())
    api.add("pods", pod(HEAD))
    api.add("pods", pod(WORKER))
    api.add("secrets", secret(f"{NAME}-driver", "token", DRIVER_TOKEN))
    api.add("secrets", secret(NAME, "auth_token", RAY_TOKEN, OF_CLUSTER))
    return api


def packed_trace(folder: Path) -> bytes:
    pieces = trace_of(read_events(folder), read_steps(folder), folder).pieces({})
    return gzip.compress("".join(pieces).encode())


@pytest.fixture
def driver(tmp_path: Path, world: FakeApi) -> Iterator[DriverServer]:
    """The worker's real endpoint, behind the pod proxy."""
    status = DriverStatus(True, 12, 300, "rollout", 0, 12, 0, False)
    server = DriverServer(
        StepLog(tmp_path),
        status=lambda: status,
        metrics=bytes,
        request_checkpoint=lambda: None,
        want_engine_nodes=lambda nodes: None,
        request_profile=lambda request: None,
        trace=lambda: packed_trace(tmp_path),
        host="127.0.0.1",
        port=0,
        token=DRIVER_TOKEN,
        address_file=tmp_path / "http.json",
        token_file=tmp_path / "http.token",
    )
    for step in range(1, 13):
        phases = {"rollout": 30.0 + step, "update_weights": 1.9, "actor_train": 12.0}
        seconds = sum(phases.values()) + 0.1
        server.log.append(StepRecord(step, 1, NOW - 1000 + 50 * step, seconds, phases, 0.1, 1.9, metrics={}))
    server.start()
    world.ports[DRIVER_PORT] = server.port
    yield server
    server.close()


# --- status ------------------------------------------------------------------------------------


def test_status_draws_the_drivers_records(run: Run, driver: DriverServer) -> None:
    code, out, err = run("status", NAME, "--steps", "3")
    assert (code, err) == (0, "")
    assert f"RLJob rl/{NAME}: Running" in out
    assert "12 of 300 steps (4%), about 4h10m left" in out
    assert "The last 3 of 12 step records" in out
    assert [line.split()[0] for line in out.splitlines() if "██▓" in line] == ["10", "11", "12"]
    assert driver.last_read == -1, "looking must not end the driver's wait for the operator"


def test_status_draws_records_that_come_in_several_pages(
    run: Run, driver: DriverServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_http, "PAGE_BYTES", 100)
    document = json.loads(run("status", NAME, "-o", "json", "--steps", "5")[1])
    assert [record["step"] for record in document["steps"]] == [8, 9, 10, 11, 12]
    assert document["source"] == "The last 5 of 12 step records"
    assert len(json.loads(run("status", NAME, "-o", "json", "--steps", "50")[1])["steps"]) == 12


def test_status_says_when_it_shows_what_the_status_keeps(run: Run, world: FakeApi) -> None:
    code, out, _ = run("status", NAME)
    assert code == 0
    assert f"The last step as the status keeps it (nothing listens on port 8300 of pod {HEAD})" in " ".join(out.split())
    assert re.search(r"rollout +31.0 s", out)
    world.objects["rljobs", "rl", NAME]["status"]["attempts"][0]["endTime"] = "2027-01-15T07:59:00Z"
    assert "(no driver is running)" in run("status", NAME)[1]


def test_status_without_the_right_to_read_secrets_says_which_right(
    run: Run, driver: DriverServer, api: FakeApi
) -> None:
    api.forbidden.add(("get", "secrets"))
    code, out, _ = run("status", NAME)
    assert code == 0
    assert "ada lacks the right to get secrets in namespace rl" in " ".join(out.split())
    assert re.search(r"rollout +31.0 s", out)


def test_no_token_goes_to_a_pod_that_took_the_heads_name(run: Run, driver: DriverServer, api: FakeApi) -> None:
    stranger = {**OF_CLUSTER, "uid": "another"}
    api.objects["pods", "rl", HEAD]["metadata"]["ownerReferences"] = [stranger]
    out = " ".join(run("status", NAME)[1].split())
    assert f"pod {HEAD} is not one of RayCluster {NAME}" in out
    assert not [line for line in api.seen if "/proxy" in line]


def test_rays_token_is_taken_from_the_clusters_own_secret_alone(run: Run, world: FakeApi) -> None:
    world.ports[8265] = FakeRay(SUBMISSION, "a line\n")
    world.objects["secrets", "rl", NAME]["metadata"]["ownerReferences"] = [OWNER]
    code, _, err = run("logs", NAME)
    assert code == 1
    assert f"Secret {NAME} is not there, is not this job's" in err


def test_status_as_a_document(run: Run, driver: DriverServer) -> None:
    document = json.loads(run("status", NAME, "-o", "json", "--steps", "2")[1])
    assert [record["step"] for record in document["steps"]] == [11, 12]
    assert document["status"]["progress"]["rewardMean"] == 0.412
    assert yaml.safe_load(run("status", NAME, "-o", "yaml")[1])["status"] == document["status"]


def test_a_job_that_nobody_has_seen(run: Run, api: FakeApi) -> None:
    api.add("rljobs", rljob())
    out = run("status", NAME)[1]
    assert "not seen by the operator yet" in out
    assert "created 3h00m ago; 2 nodes with 8 devices, ascend-a2" in out


def test_a_proxy_that_is_shut_out_is_gone_round_with_a_port_forward(
    run: Run, driver: DriverServer, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NetworkPolicy drops what comes from the control plane; a port-forward begins inside the pod."""
    api.ports[DRIVER_PORT] = lambda target, headers: (
        503,
        {
            "kind": "Status",
            "code": 503,
            "reason": "ServiceUnavailable",
            "message": "dial tcp 10.0.0.1:8300: i/o timeout",
        },
    )
    script = tmp_path / "bin" / "kubectl"
    script.parent.mkdir()
    pid = tmp_path / "pid"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys, time\n"
        f"open({str(pid)!r}, 'w').write(f'{{os.getpid()}} {{sys.argv[1:]}}')\n"
        f"print('Forwarding from 127.0.0.1:{driver.port} -> 8300', flush=True)\ntime.sleep(60)\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    code, out, _ = run("status", NAME, "--context", "test")
    assert code == 0
    assert "of 12 step records" in out
    number, _, arguments = pid.read_text().partition(" ")
    assert "--context" in arguments
    assert f"pod/{HEAD}" in arguments
    with pytest.raises(ProcessLookupError):
        os.kill(int(number), 0)


def test_a_job_without_any_step_says_why_there_are_no_records(run: Run, world: FakeApi) -> None:
    del world.objects["rljobs", "rl", NAME]["status"]["progress"]["lastStep"]
    assert "There are no step records: nothing listens on port 8300" in " ".join(run("status", NAME)[1].split())


def test_both_ways_shut_say_why(run: Run, driver: DriverServer, api: FakeApi) -> None:
    api.forbidden.add(("get", "pods/proxy"))
    out = " ".join(run("status", NAME)[1].split())
    assert "ada lacks the right to get pods/proxy in namespace rl" in out
    assert "by port-forward: kubectl is not on the PATH" in out


# --- why ---------------------------------------------------------------------------------------


def unschedulable(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


def node(name: str, **allocatable: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"allocatable": {"cpu": "64", "memory": "1Gi", **allocatable}}}


def test_why_reads_the_nodes(run: Run, api: FakeApi) -> None:
    api.add("rljobs", rljob({"phase": "Queued"}))
    api.add("rayclusters", ray_cluster(conditions=[], readyWorkerReplicas=0))
    api.add("pods", pod(HEAD))
    api.add("pods", pod(WORKER, **unschedulable("0/1 nodes are available: 1 Insufficient huawei.com/Ascend910.")))
    api.add("nodes", node("n1", **{"huawei.com/ascend-1980": "8", "hugepages-1Gi": "0"}))
    api.add("nodes", node("n2", **{"huawei.com/memory": "64k"}))
    code, out, err = run("why", NAME)
    text = " ".join(out.split())
    assert (code, err) == (0, "")
    assert text.startswith("NoSuchResource: Pod qwen3-4b-grpo-workers-worker-7qv8d has no node:")
    assert "the nodes offer huawei.com/ascend-1980, huawei.com/memory)" in text
    assert all(len(line) <= 80 for line in out.splitlines())
    api.forbidden.add(("list", "nodes"))
    document = json.loads(run("why", NAME, "-o", "json")[1])
    assert document["reason"] == "InsufficientDevices"
    assert document["unseen"] == []


def test_why_reads_kueues_workload(run: Run, api: FakeApi) -> None:
    api.groups["kueue.x-k8s.io"] = "v1beta1"
    api.add("rljobs", rljob({"phase": "Queued"}, scheduling={"system": "Kueue", "queue": "rl"}))
    api.add("rayclusters", ray_cluster(conditions=[{"type": "RayClusterSuspended", "status": "True"}]))
    owner = {"kind": "RayCluster", "name": NAME, "uid": CLUSTER_UID, "controller": True}
    message = (
        "couldn't assign flavors to pod set workers: insufficient unused quota for huawei.com/Ascend910 in flavor a2"
    )
    quota = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": message}
    for name, uid in (("raycluster-other", "else"), (f"raycluster-{NAME}-1", CLUSTER_UID)):
        meta = {"name": name, "namespace": "rl", "uid": f"of-{name}", "ownerReferences": [{**owner, "uid": uid}]}
        api.add("workloads", {"metadata": meta, "status": {"conditions": [quota]}})
    text = " ".join(run("why", NAME)[1].split())
    assert f"Kueue has not admitted Workload raycluster-{NAME}-1: couldn't assign flavors" in text


def test_why_reads_the_sandboxes_claims(run: Run, api: FakeApi) -> None:
    pool = {"isolation": "Service", "service": {"warmPool": {"name": "pool"}}}
    reward = {"name": "code", "args": {"kind": "Calls", "tests": "tests"}}
    api.add("rljobs", rljob({"phase": "Starting", "attempt": 0}, reward=reward, sandbox=pool))
    api.add("rayclusters", ray_cluster())
    for name in (HEAD, WORKER):
        api.add("pods", pod(name))
    meta = {"name": f"{NAME}-sandbox-0", "namespace": "rl", "uid": "c", "ownerReferences": [OWNER]}
    said = {
        "type": "Ready",
        "status": "False",
        "reason": "WarmPoolNotFound",
        "message": 'SandboxWarmPool "pool" not found',
    }
    labels = {"labels": {"rljob.dev/job": NAME}}
    api.add("sandboxclaims", {"metadata": {**meta, **labels}, "status": {"conditions": [said]}})
    text = " ".join(run("why", NAME)[1].split())
    assert text.startswith(f"WarmPoolNotFound: SandboxClaim {NAME}-sandbox-0 of SandboxWarmPool pool has no sandbox")
    api.forbidden.add(("list", "sandboxclaims"))
    document = json.loads(run("why", NAME, "-o", "json")[1])
    assert any("SandboxClaims" in sentence for sentence in document["unseen"])
    assert document["reason"] == "NotSubmitted", "nothing is concluded from what the user may not read"


def test_why_reads_events_and_takes_the_newest(run: Run, api: FakeApi) -> None:
    api.add("rljobs", rljob({"phase": "Starting"}))
    api.add("rayclusters", ray_cluster(conditions=[]))
    api.add("pods", pod(HEAD, phase="Pending"))
    for i, (kind, when, message) in enumerate(
        [
            ("Warning", "2027-01-15T07:58:00Z", 'MountVolume.SetUp failed for volume "models" : new'),
            ("Warning", "2027-01-15T07:50:00Z", 'MountVolume.SetUp failed for volume "models" : old'),
            ("Normal", "2027-01-15T07:59:00Z", "Pulling image"),
        ]
    ):
        meta = {"name": f"e{i}", "namespace": "rl"}
        about = {"kind": "Pod", "name": HEAD, "uid": HEAD}
        event = {"metadata": meta, "type": kind, "reason": "FailedMount", "message": message, "lastTimestamp": when}
        api.add("events", {**event, "involvedObject": about})
    text = " ".join(run("why", NAME)[1].split())
    assert "FailedMount: Pod" in text
    assert ": new;" in text


def test_why_asks_the_driver_that_runs(run: Run, world: FakeApi, driver: DriverServer) -> None:
    world.ports[DASHBOARD_PORT] = FakeRay(SUBMISSION, "")
    assert "Running: RLJob qwen3-4b-grpo runs: 12 of 300 steps done, in phase rollout." in run("why", NAME)[1]


def test_why_does_not_blame_the_head_for_what_the_user_may_not_do(
    run: Run, world: FakeApi, driver: DriverServer
) -> None:
    assert run("why", NAME)[1].startswith("Running"), "the driver answers"
    world.forbidden.add(("get", "secrets"))
    world.ports[DASHBOARD_PORT] = FakeRay(SUBMISSION, "")
    text = " ".join(run("why", NAME)[1].split())
    assert text.startswith("Running: RLJob qwen3-4b-grpo runs, as the operator saw it last: 12 steps done.")
    assert "Not looked at, so the cause may lie there: cannot read Secret" in text
    world.forbidden.clear()
    world.ports.clear()
    assert run("why", NAME)[1].startswith("HeadNotAnswering")


def test_why_names_what_it_was_not_allowed_to_see(run: Run, world: FakeApi) -> None:
    world.forbidden |= {("list", "pods"), ("list", "events")}
    code, out, _ = run("why", NAME)
    text = " ".join(out.split())
    assert code == 0
    assert "Not looked at, so the cause may lie there: cannot list the job's pods" in text
    assert "lacks the right to list events in namespace rl" in text


def test_why_repeats_what_the_operator_refused(run: Run, api: FakeApi) -> None:
    condition = {
        "type": "Queued",
        "status": "False",
        "reason": "InvalidSpec",
        "message": "spec.checkpoint.path: lies in none",
    }
    when = {"lastTransitionTime": "2027-01-15T07:00:00Z", "observedGeneration": 1}
    api.add("rljobs", rljob({"phase": "Pending", "conditions": [{**condition, **when}]}))
    assert "InvalidSpec" in run("why", NAME)[1]
    api.objects["rljobs", "rl", NAME]["metadata"]["generation"] = 2
    assert "ClusterMissing" in run("why", NAME)[1], "the spec was changed since"


# --- doctor ------------------------------------------------------------------------------------

PROBLEMS = "the doctor found 1 problem: driver: 24.1.rc1, wanted 26.0.rc1 or later; upgrade"
REPORT = "ok       python: 3.12.11\nproblem  driver: 24.1.rc1; wanted: 26.0.rc1 or later; fix: upgrade\n"


def examined(state: dict[str, Any], last: dict[str, Any] | None = None) -> dict[str, Any]:
    """A worker pod with the doctor's init container."""
    ready = {"type": "Ready", "status": "False"}
    status = {"name": "rljob-doctor", "state": state, **({"lastState": last} if last else {})}
    item = pod(WORKER, phase="Pending", conditions=[ready], initContainerStatuses=[status])
    return {**item, "spec": {**item["spec"], "initContainers": [{"name": "rljob-doctor"}]}}


def test_doctor_shows_what_a_pod_found(run: Run, world: FakeApi) -> None:
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": PROBLEMS}}
    world.add("pods", examined({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}, ended))
    world.logs[WORKER, "rljob-doctor"] = REPORT
    code, out, err = run("doctor", NAME)
    assert code == 1
    assert err == f"kubectl rljob: the doctor found problems: {WORKER}\n"
    assert out.splitlines() == [f"Pod {WORKER} on n1: problems", *(f"  {line}" for line in REPORT.splitlines())]
    document = json.loads(run("doctor", NAME, "-o", "json")[1])
    assert document == [{"pod": WORKER, "node": "n1", "state": "problems", "message": PROBLEMS, "report": REPORT}]

    world.forbidden.add(("get", "pods/log"))
    code, out, err = run("doctor", NAME)
    assert (code, out.splitlines()) == (1, [f"Pod {WORKER} on n1: problems", f"  {PROBLEMS}"])
    assert "cannot be read" in err
    assert 'cannot get resource "pods/log"' in err


def test_doctor_shows_what_a_pod_found_that_is_examined_again(run: Run, world: FakeApi) -> None:
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": PROBLEMS}}
    world.add("pods", examined({"running": {}}, ended))
    world.logs |= {(WORKER, "rljob-doctor"): "", (WORKER, "rljob-doctor~"): REPORT}
    code, out, _ = run("doctor", NAME)
    assert (code, out.splitlines()[:2]) == (1, [f"Pod {WORKER} on n1: problems", "  ok       python: 3.12.11"])
    world.add("pods", examined({"running": {}}))
    assert run("doctor", NAME) == (0, f"Pod {WORKER} on n1: running\n", "")


def test_doctor_of_pods_that_pass_or_wait(run: Run, world: FakeApi) -> None:
    world.add("pods", examined({"terminated": {"exitCode": 0, "reason": "Completed", "message": "0 problems"}}))
    world.logs[WORKER, "rljob-doctor"] = "ok       python: 3.12.11\n"
    assert run("doctor", NAME) == (0, f"Pod {WORKER} on n1: passed\n  ok       python: 3.12.11\n", "")
    world.add("pods", examined({"waiting": {"reason": "PodInitializing"}}))
    assert run("doctor", NAME) == (0, f"Pod {WORKER} on n1: waiting\n", "")


def test_why_says_what_the_doctor_found(run: Run, world: FakeApi) -> None:
    world.add("rljobs", rljob({"phase": "Starting"}))
    world.add("rayclusters", ray_cluster(readyWorkerReplicas=0))
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": PROBLEMS}}
    world.add("pods", examined({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}, ended))
    code, out, _ = run("why", NAME, "-o", "json")
    said = json.loads(out)
    assert (code, said["reason"]) == (0, "DoctorFoundProblems")
    assert "does not pass its examination: the doctor found 1 problem: driver: 24.1.rc1" in said["message"]
    assert f"`kubectl rljob doctor -n rl {NAME}`" in said["message"]
    assert "spec.pods.doctor: Skip" in said["message"]


@pytest.mark.parametrize(("status", "code"), [("SUCCEEDED", 0), ("FAILED", 1)])
def test_doctor_looks_through_the_running_cluster(run: Run, world: FakeApi, status: str, code: int) -> None:
    submitted: list[str] = []

    def ray(target: str, headers: dict[str, str]) -> Any:
        if target == "/api/version":
            return 200, {"version": "4", "session_name": "session_1"}
        assert headers["x-ray-authorization"] == f"Bearer {RAY_TOKEN}"
        if target == "/api/jobs/":
            submitted.append(target)
            return 200, {"submission_id": "x"}
        if target.startswith("/api/jobs/rljob-doctor-"):
            return 200, {"status": status, "message": "", "driver_exit_code": code, "driver_node_id": "ab"}
        return 200, REPORT

    world.ports[DASHBOARD_PORT] = ray
    answer, out, err = run("doctor", NAME)
    assert submitted
    assert answer == code
    assert out.startswith(f"All nodes: {'problems' if code else 'passed'}\n  ok       python: 3.12.11\n")
    assert ("the doctor found problems: the cluster" in err) is bool(code)


def test_doctor_of_a_job_without_a_cluster(run: Run, api: FakeApi) -> None:
    api.add("rljobs", rljob({"phase": "Suspended"}))
    code, out, err = run("doctor", NAME)
    assert (code, out) == (1, "")
    assert f"RLJob {NAME} has no running cluster to be examined" in err


# --- logs --------------------------------------------------------------------------------------

LOG = "".join(f"step {step}/300  reward 0.4\n" for step in range(1, 101)) + "the last line\x1b[2J without a break"


def test_logs_come_from_ray(run: Run, world: FakeApi) -> None:
    world.ports[DASHBOARD_PORT] = FakeRay(SUBMISSION, LOG)
    code, out, err = run("logs", NAME)
    assert (code, err) == (0, "")
    assert out == LOG.replace("\x1b", "\\x1b") + "\n"
    assert run("logs", NAME, "--tail", "2")[1].splitlines()[0] == "step 100/300  reward 0.4"


def test_logs_are_followed_until_the_driver_ends(run: Run, world: FakeApi) -> None:
    ray = FakeRay(SUBMISSION, LOG)
    world.ports[DASHBOARD_PORT] = ray
    code, out, _ = run("logs", NAME, "-f", "--tail", "10")
    assert code == 0
    assert len(out.splitlines()) == 10
    assert out.splitlines()[-1].startswith("the last line")
    assert any("/stream?" in target for target in ray.seen)
    run("logs", NAME, "-f")
    assert "/file?" in ray.seen[-1], "a driver that has ended cannot be followed"


def test_logs_of_a_cluster_that_is_gone_are_the_kept_lines(run: Run, api: FakeApi) -> None:
    attempts = [
        {"number": 0, "submissionId": "a", "endTime": "2027-01-15T07:00:00Z", "lastLogLines": ["first", "second"]},
        {"number": 1, "submissionId": "b", "endTime": "2027-01-15T07:30:00Z"},
    ]
    api.add("rljobs", rljob({"phase": "Failed", "attempts": attempts}))
    code, out, err = run("logs", NAME, "--attempt", "0", "--tail", "1")
    assert (code, out) == (0, "second\n")
    assert f"RayCluster {NAME} is gone; these are the last lines that the status keeps" in err
    code, out, err = run("logs", NAME)
    assert (code, out) == (1, "")
    assert "the log of attempt 1 cannot be read" in err
    assert "the status knows: 0, 1" in run("logs", NAME, "--attempt", "7")[2]
    api.objects["rljobs", "rl", NAME]["status"] = {"phase": "Queued"}
    assert f"kubectl rljob why {NAME}" in run("logs", NAME)[2]


def test_logs_of_an_attempt_that_another_head_ran(run: Run, world: FakeApi) -> None:
    world.ports[DASHBOARD_PORT] = FakeRay("another", LOG)
    world.objects["rljobs", "rl", NAME]["status"]["attempts"][0]["lastLogLines"] = ["kept"]
    code, out, err = run("logs", NAME)
    assert (code, out) == (0, "kept\n")
    assert "this head has not run it" in err


# --- steering ----------------------------------------------------------------------------------


def test_suspend_and_resume(run: Run, world: FakeApi) -> None:
    assert run("suspend", NAME)[1] == (
        f"rljob/{NAME} suspended: its last completed step is saved, then its devices are given back\n"
    )
    assert run("suspend", NAME)[1] == f"rljob/{NAME} is suspended already\n"
    assert run("resume", NAME)[1] == f"rljob/{NAME} resumed: it queues for devices\n"
    assert run("resume", NAME)[1] == f"rljob/{NAME} is not suspended\n"
    kind = "application/merge-patch+json"
    assert world.patches == [(NAME, {"spec": {"suspend": value}}, kind) for value in (True, False)]


def test_checkpoint_annotates(run: Run, world: FakeApi) -> None:
    assert "asked for a checkpoint" in run("checkpoint", NAME)[1]
    assert run("checkpoint", NAME)[0] == 0
    first, second = (body["metadata"]["annotations"]["rljob.dev/checkpoint-requested"] for _, body, _ in world.patches)
    assert first < second, "each request is another value"


@pytest.mark.parametrize("command", ["suspend", "resume", "checkpoint"])
def test_a_finished_job_is_left_alone(run: Run, api: FakeApi, command: str) -> None:
    api.add("rljobs", rljob({"phase": "Succeeded"}))
    code, _, err = run(command, NAME)
    assert code == 1
    assert "has succeeded" in err
    assert not api.patches


def test_only_a_running_job_takes_a_checkpoint(run: Run, api: FakeApi) -> None:
    api.add("rljobs", rljob({"phase": "Queued"}))
    assert (
        f"is Queued: only a running job can save a checkpoint; see `kubectl rljob why {NAME}`"
        in run("checkpoint", NAME)[2]
    )


def test_a_change_that_is_forbidden_names_the_right(run: Run, world: FakeApi) -> None:
    world.forbidden.add(("patch", "rljobs"))
    code, _, err = run("suspend", NAME)
    assert code == 1
    assert f"cannot suspend RLJob rl/{NAME}: ada lacks the right to patch rljobs.rljob.dev in namespace rl" in err


# --- list --------------------------------------------------------------------------------------


def test_list(run: Run, world: FakeApi) -> None:
    world.add("rljobs", rljob(name="zzz"))
    world.add("rljobs", rljob(name="elsewhere", namespace="other"))
    world.page = 2
    out = run("list")[1].splitlines()
    assert out[0].split() == ["NAME", "PHASE", "STEP", "STEPS", "ETA", "REWARD", "STEP-SECONDS", "RESTARTS", "AGE"]
    assert out[1].split() == [NAME, "Running", "12", "300", "4h10m", "0.412", "52", "-", "3h00m"]
    assert [line.split()[0] for line in out[2:]] == ["zzz"]
    assert [line.split()[:2] for line in run("list", "-A")[1].splitlines()[1:]] == [
        ["other", "elsewhere"],
        ["rl", NAME],
        ["rl", "zzz"],
    ]
    assert len(yaml.safe_load(run("list", "-A", "-o", "yaml")[1])) == 3
    assert run("list", "-n", "nowhere")[1:] == ("", "kubectl rljob: there are no RLJobs in namespace nowhere\n")


# --- what can be wrong -------------------------------------------------------------------------


def test_a_job_that_is_not_there_names_the_nearest(run: Run, world: FakeApi) -> None:
    world.add("rljobs", rljob(name="elsewhere", namespace="other"))
    assert run("status", "qwen3-4b-gpro")[2] == (
        f"kubectl rljob: there is no RLJob qwen3-4b-gpro in namespace rl; did you mean {NAME}?\n"
    )
    assert "it is in namespace other (-n other)" in run("why", "elsewhere")[2]
    assert f"there are: {NAME}" in run("logs", "x")[2]
    world.forbidden.add(("list", "rljobs"))
    assert "there is no RLJob x in namespace rl" in run("logs", "x")[2]


def test_a_cluster_without_rljobs(run: Run, api: FakeApi) -> None:
    api.has_crd = False
    assert "the CRD rljobs.rljob.dev is not installed" in run("status", NAME)[2]


def test_what_is_wrong_with_a_kubeconfig(
    run: Run, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no context 'prod'" in run("status", NAME, "--context", "prod")[2]
    assert "there are: test" in run("status", NAME, "--context", "prod")[2]
    assert "there is no kubeconfig at /nowhere" in run("status", NAME, "--kubeconfig", "/nowhere")[2]
    folder = run("status", NAME, "--kubeconfig", str(tmp_path))[2]
    assert f"{tmp_path}: a folder, not a file; name a kubeconfig with --kubeconfig or KUBECONFIG" in folder
    (tmp_path / "other").write_text("apiVersion: v1")
    assert (
        "other has no contexts: is it a kubeconfig?" in run("status", NAME, "--kubeconfig", str(tmp_path / "other"))[2]
    )
    (tmp_path / "odd").write_text("[1, 2]")
    assert "is no kubeconfig" in run("status", NAME, "--kubeconfig", str(tmp_path / "odd"))[2]
    (tmp_path / "broken").write_text("{")
    assert "cannot be read" in run("status", NAME, "--kubeconfig", str(tmp_path / "broken"))[2]
    config = str(api.kubeconfig(tmp_path / "stale", token="old"))
    assert "does not accept your credentials; log in again" in run("status", NAME, "--kubeconfig", config)[2]
    api.close()
    assert "the API server does not answer" in run("status", NAME)[2]


def test_kubeconfigs_are_merged(run: Run, world: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tmp_path / "first"
    first.write_text("contexts: [{name: mine, context: {cluster: c, user: u, namespace: other}}]")
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join([str(first), str(tmp_path / "missing"), os.environ["KUBECONFIG"]]))
    assert "in namespace other; it is in namespace rl" in run("status", NAME, "--context", "mine")[2]
    assert run("status", NAME)[0] == 0


def test_credentials_of_a_program(run: Run, world: FakeApi, tmp_path: Path) -> None:
    script = tmp_path / "login"
    script.write_text(
        f"#!{sys.executable}\nimport json, os\n"
        "assert json.loads(os.environ['KUBERNETES_EXEC_INFO'])['kind'] == 'ExecCredential'\n"
        "assert os.environ['REGION'] == 'eu'\n"
        f"print(json.dumps({{'status': {{'token': {API_TOKEN!r}}}}}))\n"
    )
    script.chmod(0o755)
    program = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": str(script),
        "env": [{"name": "REGION", "value": "eu"}],
    }
    config = str(world.kubeconfig(tmp_path / "exec", exec=program))
    assert run("suspend", NAME, "--kubeconfig", config)[0] == 0
    missing = {**program, "command": "aws-iam-nothing", "installHint": "see the manual"}
    config = str(world.kubeconfig(tmp_path / "exec", exec=missing))
    assert "needs the program aws-iam-nothing: see the manual" in run("suspend", NAME, "--kubeconfig", config)[2]
    script.write_text(f"#!{sys.executable}\nprint('no')\n")
    config = str(world.kubeconfig(tmp_path / "exec", exec=program))
    assert "gave no credentials" in run("suspend", NAME, "--kubeconfig", config)[2]


@pytest.mark.parametrize(
    "arguments",
    [[], ["status"], ["status", "a", "--steps", "0"], ["logs", "a", "--tail", "x"], ["render", "a", "--only", "b"]],
)
def test_a_wrong_command_line_is_refused(run: Run, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name in commands.COMMANDS:
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0
        assert "--namespace" in capsys.readouterr().out


# --- trace, profile ------------------------------------------------------------------------------


def told(name: str, uid: str, reason: str, time: str) -> dict[str, Any]:
    about = {"kind": "Pod", "name": uid, "uid": uid}
    meta = {"name": name, "namespace": "rl", "uid": name}
    return {"metadata": meta, "involvedObject": about, "reason": reason, "message": "image", "lastTimestamp": time}


def restarted(world: FakeApi) -> None:
    """A job whose second attempt runs, with a pod that pulled its image and whose container was restarted."""
    first = {
        **{"number": 0, "submissionId": SUBMISSION, "startTime": "2027-01-15T06:00:00Z"},
        **{"endTime": "2027-01-15T07:00:00Z", "reason": "DriverDied", "exitCode": 1},
    }
    second = {"number": 1, "submissionId": SUBMISSION, "startTime": "2027-01-15T07:30:00Z"}
    world.add("rljobs", rljob({**running(), "attempt": 1, "attempts": [first, second]}))
    died = {"startedAt": "2027-01-15T05:20:00Z", "finishedAt": "2027-01-15T07:00:00Z", "exitCode": 137}
    container = {
        "name": "ray-worker",
        "lastState": {"terminated": died},
        "state": {"running": {"startedAt": "2027-01-15T07:10:00Z"}},
    }
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2027-01-15T05:10:00Z"}
    worker = pod(WORKER, phase="Running", conditions=[placed], containerStatuses=[container])
    worker["metadata"]["creationTimestamp"] = "2027-01-15T05:00:10Z"
    world.add("pods", worker)
    world.add("events", told("a", WORKER, "Pulling", "2027-01-15T05:11:00Z"))
    world.add("events", told("b", WORKER, "Pulled", "2027-01-15T05:19:00Z"))
    world.add("events", told("c", "another-pod", "Pulling", "2027-01-15T05:11:00Z"))


def test_a_trace_has_queueing_image_pulls_restarts_and_phases_on_one_clock(
    run: Run, world: FakeApi, driver: DriverServer, tmp_path: Path
) -> None:
    restarted(world)
    file = tmp_path / "trace.json"
    code, _, err = run("trace", NAME, "-o", str(file))
    assert (code, err) == (0, "")
    events = read_strictly(file.read_text())
    origin = json.loads(file.read_text())["otherData"]["origin_unix_seconds"]
    lanes = lanes_of(events)
    minutes = {
        key: [(one["name"], round(one["ts"] / 6e7), round(one["dur"] / 6e7)) for one in slices]
        for key, slices in lanes.items()
    }
    now = round((NOW - origin) / 60)
    assert minutes[0, "job"] == [
        ("queued and starting", 0, 60),
        ("attempt 0", 60, 60),
        ("restart", 120, 30),
        ("attempt 1", 150, now - 150),
    ]
    assert minutes[0, WORKER] == [
        ("waits for a node", 0, 10),
        ("image pull", 11, 8),
        ("container ray-worker", 20, 100),
        ("container ray-worker", 130, now - 130),
    ]
    assert [e["args"].get("exitCode") for e in lanes[0, WORKER]] == [None, None, 137, None]
    last = lanes[1, "steps"][-1]
    assert last["name"] == "step 12"
    assert (last["ts"] + last["dur"]) / 1e6 + origin == pytest.approx(NOW - 400, abs=1e-5)


def test_without_a_driver_a_trace_has_what_the_cluster_says(run: Run, world: FakeApi, tmp_path: Path) -> None:
    restarted(world)
    file = tmp_path / "trace.json.gz"
    code, _, err = run("trace", NAME, "-o", str(file))
    assert (code, "without what the driver recorded" in err) == (0, True)
    assert {pid for pid, _ in lanes_of(read_strictly(gzip.decompress(file.read_bytes()).decode()))} == {0}
    code, _, err = run("trace", NAME, "-o", str(tmp_path / "no" / "file"))
    assert (code, "cannot be written: No such file" in err) == (1, True)


def test_a_profile_is_asked_for_and_refusals_are_told(run: Run, world: FakeApi, driver: DriverServer) -> None:
    asked: list[ProfileRequest] = []

    def take(request: ProfileRequest) -> None:
        if asked:
            raise BusyError("a profile of steps 14 to 15 is not done")
        asked.append(request)

    driver.request_profile = take
    assert run("profile", NAME, "--steps", "14-15", "--ranks", "0,3", "--engines", "")[0] == 0
    assert asked == [ProfileRequest(14, 15, (0, 3), ())]
    code, _, err = run("profile", NAME, "--steps", "16")
    assert (code, "409" in err, "is not done" in err) == (1, True, True)
    world.add("rljobs", rljob({"phase": "Queued"}))
    code, _, err = run("profile", NAME, "--steps", "16")
    assert (code, "is Queued: only a running job can be profiled" in err) == (1, True)


# --- render ------------------------------------------------------------------------------------


def test_render_a_file_without_a_cluster(run: Run, api: FakeApi, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    document = manifest(storage={"volumes": [{"name": "data", "mountPath": "/data", "claim": "data"}]})
    document["spec"]["checkpoint"] = {"path": "/data/checkpoints"}
    path.write_text(json.dumps(document))
    code, out, err = run("render", str(path))
    assert (code, err) == (0, "")
    assert not api.seen
    parts = list(yaml.safe_load_all(out))
    assert [part.get("kind") for part in parts[:3]] == ["RayCluster", "NetworkPolicy", "Secret"]
    assert "data" not in parts[2]
    assert parts[3]["submission_id"] == "rljob-00000000-0000-0000-0000-000000000000-0"
    assert parts[4]["kind"] == "RLJob"
    only = json.loads(run("render", str(path), "--only", "trainer", "--only", "rollout", "-o", "json")[1])
    assert list(only) == ["trainer", "rollout"]
    assert "LD_PRELOAD" in only["trainer"]["env_vars"]
    assert "LD_PRELOAD" not in only["rollout"]["env_vars"]


def test_render_a_job_of_the_cluster(run: Run, world: FakeApi) -> None:
    job = world.objects["rljobs", "rl", NAME]
    job["spec"]["storage"] = {"volumes": [{"name": "data", "mountPath": "/data", "claim": "data"}]}
    job["spec"]["checkpoint"] = {"path": "/data/checkpoints"}
    job["status"]["attempt"] = 2
    submission = yaml.safe_load(run("render", NAME, "--only", "submission")[1])
    assert submission["submission_id"] == f"rljob-{UID}-2"
    assert (
        yaml.safe_load(run("render", NAME, "--only", "submission", "--attempt", "0")[1])["submission_id"] == SUBMISSION
    )


def test_render_says_what_is_wrong(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(manifest(steps=0)))
    code, _, err = run("render", str(path))
    assert code == 1
    assert "spec.steps" in err
    document = manifest()
    del document["spec"]["image"]
    path.write_text(json.dumps(document))
    assert "--worker-image" in run("render", str(path))[2]
    assert "there is no such file" in run("render", "./nothing.yaml")[2]


def test_it_runs_as_a_program_and_survives_a_reader_that_leaves(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    document = manifest(storage={"volumes": [{"name": "data", "mountPath": "/data", "claim": "data"}]})
    document["spec"]["checkpoint"] = {"path": "/data/checkpoints"}
    path.write_text(json.dumps(document))
    command = f"{sys.executable} -m rljob_operator.plugin.main render {path} | head -n 1"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout == "# RayCluster\n"
    assert done.stderr == ""
