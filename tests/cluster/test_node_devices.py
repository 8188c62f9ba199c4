"""An `ascend-a2` job on a node that advertises NPUs: what its pods and processes see; and one that has to wait."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from kube import wait_until
from node_devices import RESOURCE, add_devices, as_ascend_job, preload_library
from node_jobs import RUN_SECONDS, START_SECONDS, NodeJob
from support.samples import unless_drawn
from whole_system import WholeSystem

from rljob_api.roles import MEMORY_SAVER_LIBRARY

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.timeout(1200), unless_drawn("a node: devices")]

LIBRARY = Path(MEMORY_SAVER_LIBRARY).name


@pytest.fixture(scope="module")
def library(system: WholeSystem) -> Path:
    """The node has one device from now on."""
    add_devices(system, 1)
    return preload_library(system.folder / "hook")


@pytest.fixture(scope="module")
def jobs(system: WholeSystem, library: Path) -> Iterator[tuple[NodeJob, NodeJob]]:
    """One job that has the device, and one that waits for it."""
    first, second = NodeJob(system, "ascend").going_on(), NodeJob(system, "waiting", "steps=3")
    for job in (first, second):
        as_ascend_job(job.manifest, library)
    with ExitStack() as stack:
        stack.callback(first.create().delete)
        first.wait_step(3)
        stack.callback(second.create().delete)
        yield first, second


@pytest.fixture(scope="module")
def first(jobs: tuple[NodeJob, NodeJob]) -> NodeJob:
    """The job that has the device."""
    return jobs[0]


def environments(job: NodeJob, role: str) -> dict[int, dict[str, str]]:
    """Environment of each process in a pod as it was started."""
    return {
        pid: dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)
        for pid, text in told_of_each(job, role, "environ")
    }


def told_of_each(job: NodeJob, role: str, file: str) -> Iterator[tuple[int, str]]:
    """A file of /proc of each process in a pod; short-lived ones (probes, Ray's own) may end meanwhile."""
    for pid in job.processes(role):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield pid, Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace")


def test_it_was_scheduled_by_the_resource(first: NodeJob) -> None:
    worker, head = first.pod("worker"), first.pod("head")
    sizes = worker["spec"]["containers"][0]["resources"]
    assert sizes["requests"][RESOURCE] == sizes["limits"][RESOURCE] == "1"
    assert RESOURCE not in head["spec"]["containers"][0]["resources"]["limits"]


def test_only_the_worker_sees_the_device(first: NodeJob) -> None:
    assert first.run_in("worker", "cat", "/dev/davinci0") == "device 0\n"
    assert first.run_in("worker", "printenv", "ASCEND_VISIBLE_DEVICES") == "0\n"
    assert first.run_in("head", "sh", "-c", "ls /dev | grep -c davinci || true") == "0\n"
    assert first.run_in("head", "printenv", "ASCEND_VISIBLE_DEVICES") == "void\n"


def test_the_drivers_files_are_mounted_read_only(first: NodeJob) -> None:
    for file in ("/usr/local/Ascend/driver/version.info", "/usr/local/bin/npu-smi", "/etc/hccn.conf"):
        assert first.run_in("worker", "cat", file) == f"{file}\n"
    said = first.run_in("worker", "sh", "-c", "touch /usr/local/Ascend/driver/x 2>&1 || true")
    assert "Read-only file system" in said


def test_rays_resource_is_that_of_the_profile(first: NodeJob) -> None:
    script = "import json, ray; ray.init('auto', log_to_driver=False); print(json.dumps(ray.cluster_resources()))"
    said = first.run_in("head", str(Path(sys.prefix) / "bin" / "python"), "-c", script)
    # Ray logs to the same stream, before and after.
    assert json.loads(next(line for line in said.splitlines() if line.startswith("{")))["NPU"] == 1


def test_trainers_alone_preload_the_memory_saver(first: NodeJob) -> None:
    trainer, engine = first.pid_of("trainer"), first.pid_of("engine")
    worker, head = environments(first, "worker"), environments(first, "head")
    # Ray preloads its own allocator into its own processes.
    assert [pid for pid, given in {**head, **worker}.items() if LIBRARY in given.get("LD_PRELOAD", "")] == [trainer]
    assert not worker[engine].get("LD_PRELOAD")
    assert worker[trainer]["LD_PRELOAD"] == MEMORY_SAVER_LIBRARY
    mapped = {pid for pid, text in told_of_each(first, "worker", "maps") if LIBRARY in text}
    assert mapped == {trainer}
    assert worker[trainer]["PYTORCH_NPU_ALLOC_CONF"] == worker[engine]["PYTORCH_NPU_ALLOC_CONF"]
    # The library's own record: nobody but the trainer, and what it may have started, ever loaded it.
    loaded = (first.system.folder / "shared" / first.name / "preloaded").read_text().split()
    assert len(set(loaded)) >= 1


def test_hccl_variables_reach_both_roles_with_ports_of_their_own(first: NodeJob) -> None:
    worker = environments(first, "worker")
    for pid in (first.pid_of("trainer"), first.pid_of("engine")):
        assert worker[pid]["HCCL_CONNECT_TIMEOUT"] == "7200"
        assert worker[pid]["HCCL_DETERMINISTIC"] == "true"
        assert worker[pid]["HCCL_SOCKET_IFNAME"] == "=eth0"
        assert worker[pid]["HCCL_HOST_SOCKET_PORT_RANGE"] == "auto"
        assert "HCCL_IF_BASE_PORT" not in worker[pid]


def test_the_driver_says_on_what_it_computes(first: NodeJob) -> None:
    log = first.system.cluster.kubectl("rljob", "logs", first.name)
    assert "computing on the CPU, whatever the profile is: RLJOB_COMPUTE_DEVICE is set" in log


def test_the_other_job_waits_with_a_reason_and_then_gets_the_device(jobs: tuple[NodeJob, NodeJob]) -> None:
    first, second = jobs

    def has_a_worker() -> bool:
        return [pod["status"]["phase"] for pod in second.pods("worker")] == ["Running"]

    second.pod("worker")
    assert wait_until(lambda: f"Insufficient {RESOURCE}" in second.why(), 60, 1), second.why()
    assert second.status()["phase"] in ("Queued", "Pending")
    assert second.records() == []
    first.change({"suspend": True})
    assert wait_until(has_a_worker, RUN_SECONDS, 0.5), second.describe()
    assert second.run_in("worker", "cat", "/dev/davinci0") == "device 0\n"
    # What it then would do is what the first one did.
    second.delete()
    first.wait("Suspended")


@pytest.fixture
def examined(system: WholeSystem, library: Path) -> Iterator[NodeJob]:
    """A job that would really compute on NPUs: the image has neither torch_npu nor CANN."""
    job = NodeJob(system, "examined")
    as_ascend_job(job.manifest, library)
    del job.manifest["spec"]["environment"]["variables"]["RLJOB_COMPUTE_DEVICE"]
    job.create()
    yield job
    job.delete()


def examination_ended(job: NodeJob) -> bool:
    """Has a container of the worker's that runs before Ray failed?"""
    pods = job.pods("worker")
    statuses = [one for pod in pods for one in pod["status"].get("initContainerStatuses", [])]
    ended = [{**one.get("lastState", {}), **one.get("state", {})}.get("terminated") for one in statuses]
    return any(one and one["exitCode"] for one in ended)


def test_a_pod_that_could_not_train_does_not_start_and_says_why(examined: NodeJob, system: WholeSystem) -> None:
    said: list[str] = []

    def refused_by_the_doctor() -> bool:
        said.append(examined.why())
        return "does not pass its examination" in said[-1]

    # `why` starts a Python, which would slow the doctor down that it waits for.
    assert wait_until(lambda: examination_ended(examined), START_SECONDS, 0.5), examined.describe()
    assert wait_until(refused_by_the_doctor, START_SECONDS, 2), examined.describe()
    assert "torch_npu" in said[-1]
    assert f"`kubectl rljob doctor -n default {examined.name}` has every line" in said[-1]
    worker = examined.pod("worker")
    [ray] = worker["status"]["containerStatuses"]
    assert ray["state"]["waiting"]["reason"] == "PodInitializing"
    with pytest.raises(RuntimeError, match="the doctor found problems") as refused:
        system.cluster.kubectl("rljob", "doctor", examined.name)
    report = str(refused.value)
    assert "torch_npu" in report
    # The stand-in for the hook was preloaded into a process of the doctor's, not into its own.
    assert "has no tms_pause" in report
