"""One job that goes on running while strangers knock, its driver stalls, and the chart is replaced under it."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube import Kube, wait_until
from node_attacks import SAYS, attacks_of_an_environment, with_attacks
from node_jobs import START_SECONDS, NodeJob
from policies import policies_enforced
from stranger import METRICS, PAGE
from strangers import listening, strangers
from support.samples import unless_drawn
from whole_system import NAMESPACE, PROMETHEUS_PORT, WholeSystem

from rljob_worker.confined import landlock

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.timeout(1200)]

DRIVER_PORT = 8300
on_the_job = unless_drawn("a node: strangers, a stall, upgrades")
needs_landlock = pytest.mark.skipif(landlock.abi() < landlock.SIGNALS_SINCE, reason="a kernel without Landlock")
RAY_PORT = 8265
TENANT = "tenant-b"
CRD = "rljobs.rljob.dev"
EARLIER = Path(__file__).parent / "charts" / "rljob-0.0.9.tgz"
"""The chart as it was when a block that is not given was still stored with its defaults: its CRD differs."""


@pytest.fixture(scope="module")
def job(system: WholeSystem) -> Iterator[NodeJob]:
    """A job that runs as long as these tests do."""
    job = with_attacks(NodeJob(system, "long").going_on()).create()
    try:
        job.wait("Running")
        yield job
    finally:
        job.delete()


# --- who may do what ---------------------------------------------------------------------------


@on_the_job
@needs_landlock
def test_a_reward_in_the_pod_reaches_no_secret_and_no_process(job: NodeJob) -> None:
    """Attacks from inside a scoring process, under the pod's own bounds: another user than root, RuntimeDefault."""
    said: list[str] = []

    def told() -> bool:
        lines = job.system.cluster.kubectl("rljob", "logs", job.name).splitlines()
        said[:] = [line.split(SAYS)[1] for line in lines if SAYS in line]
        return bool(said)

    job.wait_step(1)  # each look at the log starts a Python: none before there is something
    assert wait_until(told, START_SECONDS, 1), job.describe()
    assert all(line.startswith("[] of ") for line in said), said


@on_the_job
@needs_landlock
def test_an_environment_in_the_pod_and_a_policys_program_reach_no_more(job: NodeJob) -> None:
    job.wait("Running")
    found = attacks_of_an_environment(job)
    assert {action: succeeded for action, (succeeded, _) in found.items()} == {"itself": [], "program": []}
    assert all(tried > 30 for _, tried in found.values()), found


def ask(job: NodeJob, port: int, path: str, method: str = "GET") -> int:
    """Status of a request without a token, from a neighbour of the head pod."""
    address = head_of(job)
    with job.system.cluster.network.connect(address, port, 10) as raw:
        connection = http.client.HTTPConnection(address, port)
        connection.sock = raw
        connection.request(method, path)
        return connection.getresponse().status


@on_the_job
def test_strangers_get_nothing_from_the_driver(job: NodeJob) -> None:
    assert ask(job, DRIVER_PORT, "/healthz") == 200
    for method, path in (("GET", "/v1/status"), ("GET", "/v1/steps?after=-1"), ("POST", "/v1/checkpoint")):
        assert ask(job, DRIVER_PORT, path, method) == 401, path
    assert ask(job, DRIVER_PORT, "/metrics") == 401


@on_the_job
def test_strangers_get_nothing_from_ray(job: NodeJob) -> None:
    assert ask(job, RAY_PORT, "/api/jobs/") == 401
    assert ask(job, RAY_PORT, "/api/jobs/", "POST") == 401


@on_the_job
def test_who_reaches_the_ports_of_a_jobs_pods(job: NodeJob, system: WholeSystem) -> None:
    """Two tenants, without and with what holds pods to their policies: the table of docs/security.md."""
    job.wait("Running")
    system.cluster.kubectl("create", "namespace", TENANT)
    as_the_jobs = {"rljob.dev/job": job.name, "ray.io/cluster": job.name}
    places = listening(job)
    everything = {f"{address}:{port}" for address, ports in places.items() for port in ports}
    token = job.run_in("head", "printenv", "RAY_AUTH_TOKEN").strip()
    wanted = {"neighbour": ("default", {}), "tenant": (TENANT, as_the_jobs), "own": ("default", as_the_jobs)}
    with strangers(job, wanted) as pods:
        open_to = pods["tenant"].tries(places)
        assert set(open_to) == everything, "nothing is closed but by its policy"
        answered = {what for answers in open_to.values() for what in answers}
        assert answered <= {"/healthz", METRICS, PAGE}, open_to
        told = {what for answers in pods["own"].tries(places, token).values() for what in answers}
        assert told >= {"/api/jobs/", "NodeInfoGcsService/GetAllNodeInfo", "NodeManagerService/GetNodeStats"}, told
        with policies_enforced(system.cluster):
            assert pods["neighbour"].tries(places) == {}
            assert pods["tenant"].tries(places, token) == {}, "labels are of a namespace"
            assert set(pods["own"].tries(places)) == everything, "who may make pods of the namespace"
            assert operator_reaches(system, places) == {f"{head_of(job)}:{port}" for port in (RAY_PORT, DRIVER_PORT)}
            assert advances(job)


def head_of(job: NodeJob) -> str:
    address: str = job.pod("head")["status"]["podIP"]
    return address


def operator_reaches(system: WholeSystem, places: dict[str, list[int]]) -> set[str]:
    """Places that take a connection of the operator's pod."""
    script = (
        "import json, socket, sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def reaches(place):\n"
        "    try:\n"
        "        socket.create_connection(place, 2).close()\n"
        "    except OSError:\n"
        "        return None\n"
        "    return f'{place[0]}:{place[1]}'\n"
        "places = [(host, port) for host, ports in json.loads(sys.argv[1]).items() for port in ports]\n"
        "print(json.dumps([found for found in ThreadPoolExecutor(16).map(reaches, places) if found]))"
    )
    command = ("exec", "deployment/rljob", "-n", NAMESPACE, "--", "/opt/rljob/bin/python", "-c", script)
    return set(json.loads(system.cluster.kubectl(*command, json.dumps(places))))


@on_the_job
def test_the_jobs_pods_have_no_token_of_the_api_server(job: NodeJob) -> None:
    for role in ("head", "worker"):
        assert job.run_in(role, "sh", "-c", "ls /var/run/secrets 2>/dev/null | wc -l") == "0\n"
        assert job.run_in(role, "id", "-u") == "1000\n"
    pod = job.pod("worker")
    account = f"system:serviceaccount:default:{pod['spec']['serviceAccountName']}"
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": account, "groups": ["system:serviceaccounts", "system:authenticated"]},
    }
    for verb, group, resource in (("get", "", "secrets"), ("list", "", "pods"), ("get", "rljob.dev", "rljobs"),
                                  ("create", "ray.io", "rayclusters"), ("create", "", "pods/exec")):  # fmt: skip
        attributes = {"namespace": "default", "verb": verb, "group": group, "resource": resource.split("/")[0]}
        review["spec"]["resourceAttributes"] = attributes
        answer = job.kube.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        assert answer["status"]["allowed"] is False, (verb, resource)


def test_the_operators_pod_is_no_root_and_cannot_write(system: WholeSystem) -> None:
    def inside(script: str) -> str:
        command = ("exec", "deployment/rljob", "-n", NAMESPACE, "--", "/opt/rljob/bin/python", "-c", script)
        return system.cluster.kubectl(*command).strip()

    assert inside("import os; print(os.getuid(), os.getgid())") == "65532 65532"
    tried = (
        "import json\n"
        "def write(path):\n"
        "    try:\n"
        "        open(path, 'w')\n"
        "    except OSError as error:\n"
        "        return error.errno\n"
        "print(json.dumps([write(path) for path in ('/x', '/tmp/x', '/opt/rljob/x', '/etc/passwd')]))"
    )
    errors = json.loads(inside(tried))
    assert all(errors), errors
    capabilities = inside("print(open('/proc/self/status').read())")
    assert "CapEff:\t0000000000000000" in capabilities
    assert "NoNewPrivs:\t1" in capabilities


# --- alerts ------------------------------------------------------------------------------------


def alerts(system: WholeSystem, job: NodeJob) -> dict[str, str]:
    """State of the alerts about a job: pending or firing."""
    found = system.query(f'ALERTS{{rljob="{job.name}"}}')
    return {series["metric"]["alertname"]: series["metric"]["alertstate"] for series in found}


def test_prometheus_evaluates_every_rule(system: WholeSystem) -> None:
    client = Kube(system.cluster.network, "127.0.0.1", PROMETHEUS_PORT, None, "")

    def rules() -> list[dict[str, str]]:
        groups = client.request("GET", "/api/v1/rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    assert wait_until(lambda: all(rule["health"] == "ok" for rule in rules()), 30, 0.5), rules()
    assert len(rules()) >= 12


@on_the_job
def test_a_stalled_driver_is_told_and_told_no_more_when_it_goes_on(job: NodeJob, system: WholeSystem) -> None:
    job.wait("Running")
    # Without any step on record it is an hour before a job counts as stalled.
    system.wait_query(f'rljob_step_seconds_count{{rljob="{job.name}"}} > 2', 60)
    assert "RLJobStepStalled" not in alerts(system, job)
    driver = job.pid_of("driver")
    os.kill(driver, signal.SIGSTOP)
    try:
        fired = wait_until(lambda: alerts(system, job).get("RLJobStepStalled") == "firing", 90, 0.5)
    finally:
        os.kill(driver, signal.SIGCONT)
    assert fired, job.describe()
    assert wait_until(lambda: "RLJobStepStalled" not in alerts(system, job), 60, 0.5)
    assert job.status().get("restarts", 0) == 0


# --- upgrade -----------------------------------------------------------------------------------


def pods_of(job: NodeJob) -> set[str]:
    return {pod["metadata"]["uid"] for pod in job.pods()}


def advances(job: NodeJob, seconds: float = 120) -> bool:
    """Whether it makes another step from now on."""
    before = len(job.records())
    return wait_until(lambda: len(job.records()) > before, seconds, 0.25)


@on_the_job
def test_the_job_outlives_upgrade_and_uninstallation(job: NodeJob, system: WholeSystem) -> None:
    pods = pods_of(job)
    system.install(EARLIER)
    earlier = system.kube.get("CustomResourceDefinition", None, CRD)["spec"]
    assert advances(job)
    assert pods_of(job) == pods

    system.install()
    assert system.kube.get("CustomResourceDefinition", None, CRD)["spec"] != earlier
    assert advances(job)
    assert pods_of(job) == pods

    said = system.cluster.helm("uninstall", "rljob", f"--namespace={NAMESPACE}", "--wait")
    assert "CustomResourceDefinition" in said, "it says what remains"
    assert wait_until(lambda: not system.kube.list("Pod", NAMESPACE), 60, 0.5)
    assert advances(job)
    assert pods_of(job) == pods
    assert job.status()["phase"] == "Running"

    system.install()
    done = len(job.records()) + 5
    job.change({"steps": done})
    job.wait("Succeeded")
    status = job.status()
    assert (status.get("restarts", 0), status["attempt"]) == (0, 0)
    assert [record["attempt"] for record in job.records()] == [1] * len(job.records())


@on_the_job
def test_an_upgrade_hands_the_lease_over(system: WholeSystem) -> None:
    """The new pod waits beside the old one, which gives the Lease back."""
    system.cluster.kubectl("rollout", "restart", "deployment/rljob", "-n", NAMESPACE)
    system.cluster.kubectl("rollout", "status", "deployment/rljob", "-n", NAMESPACE, "--timeout=90s")

    def leads() -> bool:
        holders = [lease["spec"].get("holderIdentity") or "" for lease in system.kube.list("Lease", NAMESPACE)]
        pods = [pod["metadata"]["name"] for pod in system.kube.list("Pod", NAMESPACE)
                if "deletionTimestamp" not in pod["metadata"]]  # fmt: skip
        return any(holder.startswith(pod) for holder in holders for pod in pods)

    assert wait_until(leads, 120, 0.2), system.kube.list("Lease", NAMESPACE)
