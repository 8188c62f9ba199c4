"""Start-up checks, sleep, wake and sharing on the stand-in NPU, which has the names of the register and no others."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from stub.build import Stub, build

HERE = Path(__file__).parent
Done = subprocess.CompletedProcess[str]
SCENARIO = [sys.executable, str(HERE / "scenario.py")]


@pytest.fixture(scope="session")
def stub() -> Stub:
    return build()


def environment(stub: Stub, mode: str, **changed: str | None) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    places = [str(stub.folder), str(HERE.parent / "worker" / "weightsync")]
    path = os.pathsep.join([*places, *(entry for entry in sys.path if entry and entry != str(HERE))])
    merged = own | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | stub.environment(mode) | changed
    return {name: value for name, value in merged.items() if value is not None}


def run(stub: Stub, name: str, mode: str = "preload", **changed: str | None) -> Done:
    env = environment(stub, mode, **changed)
    return subprocess.run([*SCENARIO, name], env=env, capture_output=True, text=True, timeout=300, check=False)


REFUSALS = {
    "wrong path": ({"LD_PRELOAD": "/nowhere/torch_memory_saver.so"}, "library: found none in /proc/self/maps"),
    "not enabled": ({"TMS_INIT_ENABLE": None}, "tracking: found TMS_INIT_ENABLE='', main thread not tracked"),
    "inert": ({"STUB_INERT": "1"}, "sleep and wake: found 0 bytes given back"),
}
"""One of each kind: all faults of the environment are told apart in tests/worker/memory/test_torch_saver.py."""
LACKING = {
    "tms_resume": "the library lacks tms_resume",
    "mem_get_info": "has no attribute 'mem_get_info'",
}


@pytest.fixture(scope="session")
def outcomes(stub: Stub) -> Iterator[dict[str, Future[Done]]]:
    """All scenarios of one process, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {f"cycle {mode}": pool.submit(run, stub, "cycle", mode) for mode in ("preload", "torch")}
        runs |= {name: pool.submit(run, stub, name) for name in ("touch", "cached", "twice", "short", "threads")}
        runs |= {case: pool.submit(run, stub, "check", **changed) for case, (changed, _) in REFUSALS.items()}
        runs |= {name: pool.submit(run, build(without=[name]), "check") for name in LACKING}
        yield runs


@pytest.mark.parametrize("mode", ["preload", "torch"])
def test_verified_sleep_and_wake(outcomes: dict[str, Future[Done]], mode: str) -> None:
    done = outcomes[f"cycle {mode}"].result()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["identity", f"{socket.gethostname()}:npu:5", "5", "cpu:gloo,npu:hccl"]


@pytest.mark.parametrize("name", ["touch", "cached"])
def test_touching_what_sleeps_ends_the_process(outcomes: dict[str, Future[Done]], name: str) -> None:
    done = outcomes[name].result()
    assert (done.returncode, done.stdout.split()[:1]) == (-11, ["paused"]), done.stderr


@pytest.mark.parametrize(("name", "said"), [("short", "alive"), ("threads", "apart")])
def test_memory_is_refused_by_torch_and_pools_are_of_one_thread(
    outcomes: dict[str, Future[Done]], name: str, said: str
) -> None:
    done = outcomes[name].result()
    assert (done.returncode, done.stdout.split()) == (0, [said]), done.stderr


def test_the_library_ends_the_process_when_paused_twice(outcomes: dict[str, Future[Done]]) -> None:
    """Why MemorySaver stands in front of it."""
    done = outcomes["twice"].result()
    assert (done.returncode, done.stdout.split()[:1]) == (1, ["paused"]), done.stderr
    assert "aclrtUnmapMem failed" in done.stderr


@pytest.mark.parametrize("case", REFUSALS)
def test_a_memory_saver_that_would_not_work_is_refused_before_anything_is_built(
    outcomes: dict[str, Future[Done]], case: str
) -> None:
    done = outcomes[case].result()
    assert done.returncode == 1
    assert REFUSALS[case][1] in done.stderr.strip().splitlines()[-1], done.stderr


@pytest.mark.parametrize("name", LACKING)
def test_a_name_that_the_register_lacks_is_not_there(outcomes: dict[str, Future[Done]], name: str) -> None:
    """The stand-in is made from the register: without a name, the code that needs it fails."""
    done = outcomes[name].result()
    assert done.returncode == 1
    assert LACKING[name] in done.stderr, done.stderr


def test_a_shared_tensor_crosses_processes_while_the_rest_sleeps(stub: Stub) -> None:
    uuid = "11112222-3333-4444-5555-666677778888"
    producer = subprocess.Popen(
        [*SCENARIO, "share"],
        env=environment(stub, "preload", STUB_UUID=uuid),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert producer.stdout is not None
        line = producer.stdout.readline()
        assert f":npu:{uuid}" in line, producer.communicate()[1]
        # The engine's process: another list of devices, no memory saver, the same physical device.
        env = environment(stub, "torch", STUB_UUID=uuid, ASCEND_RT_VISIBLE_DEVICES="4", TMS_HOOK_MODE="torch")
        done = subprocess.run(
            [*SCENARIO, "receive"], env=env, input=line, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.stdout == "received\n", done.stderr
        _, errors = producer.communicate("go on\n", timeout=300)
        assert producer.returncode == 0, errors
    finally:
        producer.kill()


def test_weights_cross_from_a_trainer_that_sleeps_in_between_to_an_engine(stub: Stub) -> None:
    """The whole weight sync on the device's own slots: exported once, opened by another process, verified there."""
    uuid = "11112222-3333-4444-5555-666677778888"
    with tempfile.TemporaryDirectory(prefix="rljob-test-") as folder:
        shared = {"STUB_UUID": uuid, "SYNC_FOLDER": folder}
        engine = {"TMS_HOOK_MODE": "torch", "ASCEND_RT_VISIBLE_DEVICES": "4"}
        with ThreadPoolExecutor() as pool:
            sent = pool.submit(run, stub, "send", "preload", **shared)
            landed = pool.submit(run, stub, "land", "torch", **shared, **engine).result()
        assert (landed.returncode, landed.stdout.split()[0]) == (0, "landed"), landed.stderr
        assert sent.result().returncode == 0, sent.result().stderr
        assert int(sent.result().stdout.split()[1]) > 3, "several buckets, so both slots are used again"


def test_the_doctor_tries_what_a_job_does(stub: Stub) -> None:
    """The steps of `rljob doctor --deep` that need nothing of vLLM and HCCL, and what it says of the hook."""
    settings = json.dumps({"kind": "npu", "saver": "preload", "devices": ["5"]})
    for step, mode, found in (
        ("saver", "preload", "256 MiB slept and woke"),
        ("checksum", "torch", " GiB/s"),
        ("sharing", "torch", "256 MiB seen by"),
    ):
        said = doctor(stub, mode, "deep_steps", step, settings)
        assert '"status": "ok"' in said
        assert found in said
    for mode, hooked in (("preload", True), ("torch", False)):
        assert json.loads(doctor(stub, mode, "process"))["hooked"] is hooked


def doctor(stub: Stub, mode: str, module: str, *arguments: str) -> str:
    """What a process of the doctor's prints."""
    command = [sys.executable, "-m", f"rljob_worker.doctor.{module}", *arguments]
    env = environment(stub, mode)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
