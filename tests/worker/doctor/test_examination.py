"""Judging facts: a healthy node passes, and each fault is named, with what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from doctor_cases import GIB, SPEC, WANTED, bad, changed, node, problems, role
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.profiles import PROFILES
from rljob_api.wanted import Wanted
from rljob_worker.confined.kernel import Kernel
from rljob_worker.doctor.built_for import built_for, generation
from rljob_worker.doctor.devices import NoDeviceList, visible_devices
from rljob_worker.doctor.examine import examine
from rljob_worker.doctor.facts import Interface, NodeFacts, NpuPort, ProcessFacts, StoragePath
from rljob_worker.doctor.findings import Finding, Report, Status
from rljob_worker.doctor.network import NoPortRange, chosen_interface, port_range
from rljob_worker.doctor.nodes import compare, ping_targets
from rljob_worker.doctor.output import TERMINATION_BYTES, line, termination_message
from rljob_worker.doctor.parsers import DeviceTable
from rljob_worker.doctor.versions import LINES, STACKS, line_of

HEALTHY = node()
JEMALLOC = "/usr/lib/aarch64-linux-gnu/libjemalloc.so.2"


def trainer(**variables: str) -> ProcessFacts:
    return role({**HEALTHY.trainer.variables, **variables})


def chips(**first: object) -> DeviceTable:
    assert HEALTHY.devices is not None
    return DeviceTable("26.0.rc1", (replace(HEALTHY.devices.chips[0], **first), *HEALTHY.devices.chips[1:]))


def test_a_healthy_node_has_neither_warnings_nor_problems() -> None:
    assert bad(HEALTHY) == {}
    assert bad(HEALTHY, None) == {}
    judged = [f for f in examine(HEALTHY, WANTED) if f.status is Status.OK]
    assert len(judged) >= 20


FAULTS: dict[str, tuple[NodeFacts, set[str]]] = {
    "old driver": (changed(HEALTHY, driver="24.1.0.3"), {"driver"}),
    "no driver": (changed(HEALTHY, driver=""), {"driver"}),
    "firmware above the driver's range": (changed(HEALTHY, firmware="9.0.0.1.100"), {"firmware"}),
    "CANN of the spike": (changed(HEALTHY, cann="9.0.0"), {"cann"}),
    "no CANN": (changed(HEALTHY, cann=""), {"cann"}),
    "torch_npu that ignores LD_PRELOAD": (changed(HEALTHY, torch_npu="2.10.0.post2"), {"torch_npu"}),
    "torch_npu of another torch": (changed(HEALTHY, torch_npu="2.9.0"), {"torch_npu"}),
    "torch of another torch_npu": (changed(HEALTHY, torch="2.11.0"), {"torch", "torch_npu"}),
    "no vllm-ascend": (changed(HEALTHY, **{"vllm-ascend": ""}), {"vllm-ascend"}),
    "an image for A3": (node(built_for="A3"), {"vllm-ascend's device type"}),
    "an image for A2 on A3": (node(devices=chips(name="Ascend910")), {"vllm-ascend's device type"}),
    "an image for A3, no chip seen": (
        node(built_for="A3", devices=None, devices_problem="hangs"), {"vllm-ascend's device type", "device health"}),
    "python 3.10": (changed(HEALTHY, python="3.10.14"), {"python"}),
    "seven devices": (node(device_files=tuple(range(7))), {"visible devices"}),
    "a list with spaces": (node(trainer=trainer(ASCEND_RT_VISIBLE_DEVICES="0, 1")), {"visible devices"}),
    "a list beyond the container": (node(trainer=trainer(ASCEND_RT_VISIBLE_DEVICES="8,9")), {"visible devices"}),
    "npu-smi hangs": (node(devices=None, devices_problem="no answer within 20 s"), {"device health"}),
    "a sick device": (node(devices=chips(health="Alarm")), {"device health"}),
    "a device in use": (node(devices=chips(used_mib=60889, processes=("python (7)",))), {"device memory free"}),
    "no library": (node(saver=None), {"memory saver library"}),
    "the CUDA library": (
        node(saver=replace(HEALTHY.saver, build="CUDA")), {"memory saver library"}),
    "another library than the image's": (
        node(saver=replace(HEALTHY.saver, sha256="cd" * 32)), {"memory saver digest"}),
    "a copy of the library": (node(saver_copies=("/x/a.so", "/y/a.so")), {"memory saver package"}),
    "jemalloc too": (
        node(trainer=trainer(LD_PRELOAD=f"{JEMALLOC}:{HEALTHY.saver.path}")), {"LD_PRELOAD of trainers"}),
    "jemalloc by another way": (
        node(trainer=replace(HEALTHY.trainer, libraries=(JEMALLOC,))), {"LD_PRELOAD of trainers"}),
    "the hook was ignored": (
        node(trainer=replace(HEALTHY.trainer, ignored="ld.so: cannot be preloaded")), {"LD_PRELOAD of trainers"}),
    "trainers die": (node(trainer=ProcessFacts(problem="ended with exit code 127")), {"LD_PRELOAD of trainers"}),
    "torch mode variables with preload": (node(trainer=trainer(TMS_HOOK_MODE="torch")), {"memory saver hook"}),
    "the image's allocator setting": (
        node(trainer=trainer(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")), {"allocator of trainers"}),
    "no allocator setting": (
        node(rollout=role({})), {"allocator of engines"}),
    "both allocator settings on the 26.2 line": (
        changed(node(trainer=trainer(PYTORCH_ALLOC_CONF="expandable_segments:False")), torch_npu="2.10.0.post7"),
        {"allocator of trainers"}),
    "no such interface": (node(trainer=trainer(HCCL_SOCKET_IFNAME="=enp1s0")), {"HCCL interface"}),
    "ports taken": (
        node(trainer=trainer(HCCL_HOST_SOCKET_PORT_RANGE="60000-60015"), busy_ports=(60003,)), {"HCCL ports"}),
    "ports that are none": (node(trainer=trainer(HCCL_HOST_SOCKET_PORT_RANGE="60000,x")), {"HCCL ports"}),
    "TLS on one device": (node(ports=(NpuPort(0, "UP", True), *HEALTHY.ports[1:])), {"NPU TLS"}),
    "the head's GCS is closed": (
        node(unreachable={"head:6379": "refused", "head:8265": ""}), {"Ray's ports"}),
    "Docker's /dev/shm": (node(shared_memory_total=64 << 20, shared_memory_free=64 << 20), {"/dev/shm"}),
    "no shared memory": (node(shared_memory_ipc="Permission denied"), {"memory between processes"}),
    "no model folder": (node(model=StoragePath("/models/Qwen3-4B", False, "/", True)), {"model folder"}),
    "a run folder that is read-only": (node(runs=StoragePath("/a/b", False, "/a", False)), {"run folder"}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "lines"),
    [
        (Kernel(0, True), {"confined rewards", "sandbox of programs"}),
        (Kernel(3, True), {"confined rewards"}),
        (Kernel(7, False), {"confined rewards", "sandbox of programs"}),
    ],
)
def test_a_kernel_that_cannot_confine_is_a_warning(kernel: Kernel, lines: set[str]) -> None:
    found = bad(replace(HEALTHY, kernel=kernel))
    assert {name for name, finding in found.items() if finding.status is Status.WARNING} == found.keys() == lines


def test_namespaces_for_programs_are_told_and_no_fault_where_there_are_none() -> None:
    for reason, said in (("", "isolation Namespace too"), ("no bwrap", "no isolation Namespace: no bwrap")):
        (found,) = [f for f in examine(node(no_namespaces=reason), WANTED) if f.name == "sandbox of programs"]
        assert found.status is Status.OK
        assert said in found.found


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_a_problem_of_its_own_with_a_way_out(fault: str) -> None:
    facts, expected = FAULTS[fault]
    found = bad(facts)
    assert {name for name, f in found.items() if f.status is Status.PROBLEM} == expected
    assert all(f.fix and f.wanted and f.found for f in found.values())


WARNED: dict[str, tuple[NodeFacts, str]] = {
    "another vllm": (changed(HEALTHY, vllm="0.24.0"), "vllm"),
    "another vllm-ascend": (changed(HEALTHY, **{"vllm-ascend": "0.26.0rc1"}), "vllm-ascend"),
    "the 26.2 line": (changed(HEALTHY, torch_npu="2.10.0.post7"), "torch_npu"),
    "a chip of no known generation": (node(devices=chips(name="1000X")), "vllm-ascend's device type"),
    "newer CANN": (changed(HEALTHY, cann="9.2.0"), "cann"),
    "a driver below the tested one": (changed(HEALTHY, driver="25.5.1"), "driver"),
    "no digest in the image": (node(saver=replace(HEALTHY.saver, recorded=None)), "memory saver digest"),
    "links down": (node(ports=(NpuPort(0, "DOWN", False), *HEALTHY.ports[1:])), "NPU links"),
    "some device memory used": (node(devices=chips(used_mib=20000)), "device memory free"),
    "little /dev/shm": (node(shared_memory_total=GIB // 2, shared_memory_free=GIB // 2), "/dev/shm"),
    "little host memory": (node(host_free=GIB), "host memory"),
    "the dashboard alone is closed": (node(unreachable={"h:6379": "", "h:8265": "refused"}), "Ray's ports"),
}


@pytest.mark.parametrize("fault", WARNED)
def test_what_may_work_is_a_warning(fault: str) -> None:
    facts, name = WARNED[fault]
    found = bad(facts)
    assert set(found) == {name}
    assert found[name].status is Status.WARNING
    assert found[name].fix


def test_what_the_job_wants_decides() -> None:
    torch_mode = Wanted.of(
        SPEC.model_copy(update={"memory_saver": SPEC.memory_saver.model_copy(update={"mode": "torch"})})
    )
    old = changed(node(trainer=role(dict(torch_mode.trainer)), saver=None), torch_npu="2.10.0.post2")
    assert problems(old, torch_mode) == set()
    assert bad(old, torch_mode)["torch_npu"].status is Status.WARNING
    assert problems(node(shared_memory_total=4 * GIB), WANTED.model_copy(update={"shared_memory": "8Gi"})) == {
        "/dev/shm"
    }
    no_devices = node(device_files=(), devices=None, devices_problem="-", ports=())
    assert problems(no_devices, WANTED.model_copy(update={"devices": None})) == set()
    nodes = WANTED.model_copy(update={"nodes": 2})
    assert set(bad(node(trainer=role({**WANTED.trainer})), nodes)) == {"HCCL interface"}
    silent = node(ports=(NpuPort(0),), ports_problem="hccn_tool is not on the PATH")
    assert problems(silent, nodes) == set(), "it may want root: a finding, and no reason to keep a pod from starting"
    assert "NPU network" in bad(silent, nodes)
    assert problems(silent) == set()


def test_a_cpu_node_is_judged_by_what_applies() -> None:
    cpu = node(kind="cpu", versions={**HEALTHY.versions, "torch": "2.11.0"}, devices=None, saver=None)
    found = examine(cpu, None)
    assert {f.name for f in found if f.status is Status.NOT_APPLICABLE} >= {
        "devices",
        "memory saver",
        "allocator",
        "HCCL",
    }
    assert [f for f in found if f.status in (Status.PROBLEM, Status.WARNING)] == []


def test_the_table_knows_each_torch_npu_once() -> None:
    versions = [version for row in LINES for version in row.versions]
    assert len(versions) == len(set(versions))
    for row in STACKS:
        line_ = line_of(row.torch_npu)
        assert line_ is not None
        # The newest ones were released with a CANN that is newer than torch_npu's own line.
        assert line_.cann.split(".")[:1] <= row.cann.split(".")[:1]
        assert row.source


@given(st.lists(st.integers(0, 63), unique=True))
def test_lists_of_devices(numbers: list[int]) -> None:
    text = ",".join(map(str, numbers))
    if numbers == sorted(numbers):
        assert visible_devices(text) == tuple(numbers)
    else:
        with pytest.raises(NoDeviceList, match="ascend"):
            visible_devices(text)


@pytest.mark.parametrize("text", ["0, 1", "0,1 ", "0;1", "a", "-1", "0,,1", "0,0", "GPU-1a2b"])
def test_no_lists_of_devices(text: str) -> None:
    with pytest.raises(NoDeviceList):
        visible_devices(text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "enp1s0"), ("eth", "eth0"), ("=eth0", "eth0"), ("=eth", None), ("^enp,eth", "docker0"),
        ("^=eth0", "docker0"), ("lo", "lo"), ("docker,lo", "docker0"), ("wlan", None), ("eth1", None),
    ],
)  # fmt: skip
def test_the_interface_that_hccl_takes(value: str | None, expected: str | None) -> None:
    known = [Interface(n, n != "eth1") for n in ("docker0", "enp1s0", "eth0", "eth1", "lo")]
    if value == "^=eth0":
        known = [i for i in known if i.name != "enp1s0"]
    found = chosen_interface(value, known)
    assert (found.name if found else None) == expected


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 16), ({"HCCL_IF_BASE_PORT": "23456"}, 16), ({"HCCL_HOST_SOCKET_PORT_RANGE": "auto"}, 0),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "60000-60050,61000"}, 52), ({"HCCL_HOST_SOCKET_PORT_RANGE": "60000"}, 1),
    ],
)  # fmt: skip
def test_port_ranges(variables: dict[str, str], count: int) -> None:
    assert len(port_range(variables)) == count


@pytest.mark.parametrize("value", ["", "60050-60000", "70000", "a-b", "0-5", "60000-60050,"])
def test_no_port_ranges(value: str) -> None:
    with pytest.raises(NoPortRange):
        port_range({"HCCL_HOST_SOCKET_PORT_RANGE": value})


@given(st.lists(st.sampled_from(list(Status)), max_size=8))
def test_the_result_is_the_worst_and_decides_the_exit_code(statuses: list[Status]) -> None:
    report = Report("cpu", None, ("a",), False, tuple(Finding(str(i), s, "found") for i, s in enumerate(statuses)))
    has_problem, has_warning = Status.PROBLEM in statuses, Status.WARNING in statuses
    assert report.exit_code(strict=False) == has_problem
    assert report.exit_code(strict=True) == (has_problem or has_warning)
    worst = Status.PROBLEM if has_problem else Status.WARNING if has_warning else Status.OK
    assert report.result() is worst
    assert report.document()["result"] == worst.value
    assert sum(report.document()["counts"].values()) == len(statuses)


@given(st.integers(1, 40), st.integers(0, 300))
def test_a_pod_status_names_every_problem_as_long_as_they_fit(count: int, length: int) -> None:
    findings = tuple(Finding(f"n{i}", Status.PROBLEM, "é" * length, "w", "f") for i in range(count))
    text = termination_message(Report("npu", "ascend-a2", ("a",), False, findings))
    assert len(text.encode()) <= TERMINATION_BYTES
    assert str(count) in text
    if count <= 20:
        assert all(f"n{i}: " in text for i in range(count))


def test_a_line_is_one_line() -> None:
    text = line(Finding("x", Status.PROBLEM, "a\nb\x1b[31m", "c", "d", "host"), True)
    assert "\n" not in text
    assert "\x1b" not in text
    assert text == "problem  host: x: a b\\x1b[31m; wanted: c; fix: d"


def test_nodes_are_held_against_each_other() -> None:
    other = replace(HEALTHY, host="b")
    two = WANTED.model_copy(update={"nodes": 2})
    assert {f.status for f in compare([HEALTHY, other], two)} == {Status.OK}

    def wrong(second: NodeFacts) -> dict[str, Status]:
        return {f.name: f.status for f in compare([HEALTHY, second], two) if f.status is not Status.OK}

    assert {f.name for f in compare([HEALTHY], two) if f.status is Status.PROBLEM} == {"nodes"}
    assert wrong(replace(other, packages="other")) == {"image": Status.PROBLEM}
    assert wrong(changed(other, cann="9.1.1")) == {"cann on all nodes": Status.PROBLEM}
    assert wrong(replace(other, ports=(NpuPort(0, "UP", True),))) == {"NPU TLS on all nodes": Status.PROBLEM}
    named = replace(other, trainer=role({}), interfaces=(Interface("enp1s0", True),))
    assert wrong(named) == {"HCCL interface on all nodes": Status.WARNING}


def test_each_npu_pings_its_counterpart_on_the_next_node() -> None:
    a = node(ports=(NpuPort(0, address="10.0.0.1"), NpuPort(1, address="10.0.0.2")))
    b = node(host="b", ports=(NpuPort(0, address="10.0.1.1"), NpuPort(1)))
    assert ping_targets([a, b]) == [[(0, "10.0.1.1")], [(0, "10.0.0.1"), (1, "10.0.0.2")]]
    assert ping_targets([a]) == [[]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# Auto-generated file\n__device_type__ = 'A3'\n", "A3"),
        ("__device_type__ = f()\n", None),
        ("=", None),
        (None, None),
    ],
)
def test_the_images_device_type_is_read_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: str | None
) -> None:
    package = tmp_path / "vllm_ascend"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    if text is not None:
        (package / "_build_info.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert built_for() == expected


def test_every_profile_with_a_chip_has_a_generation() -> None:
    chips = {profile.chip for profile in PROFILES.values() if profile.chip is not None}
    assert {generation(chip) for chip in chips} == {"A2", "A3", "A5"}


def test_the_documentation_has_every_line() -> None:
    text = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    explained = text[: text.index("## Examples")]
    names = {f.name for f in examine(HEALTHY, WANTED)} | {f.name for f in compare([HEALTHY, HEALTHY], WANTED)}
    assert {name for name in names if f"`{name}`" not in explained} == set()
