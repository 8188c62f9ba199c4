"""A job on a machine with devices and no Kubernetes: its devices, and the messages when something is missing."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rljob_api import RLJobSpec, roles
from rljob_api.profiles.base import BACKEND_AUTOLOAD_VARIABLE
from rljob_operator.render.hardware import resolve
from rljob_operator.render.variables import COMPILE_CACHE, pod_environment
from rljob_worker.cluster import cluster as cluster_module
from rljob_worker.cluster import machine
from rljob_worker.cluster.calls import Calls
from rljob_worker.cluster.cluster import Cluster
from rljob_worker.cluster.machine import check_machine, compiler_variables, machine_variables, shared_cache
from rljob_worker.cluster.placement import reserve_devices
from rljob_worker.cluster.ray_session import embedded
from rljob_worker.devices.kinds import device_kind
from rljob_worker.errors import UserError

LIBRARY = "/site-packages/torch_memory_saver_hook_mode_preload.abi3.so"
OF_PODS = {"RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness", "RAY_raylet_start_wait_time_s", "PYTHONUNBUFFERED"} | {
    "RAY_agent_register_timeout_ms",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S",
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT",
    "HCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "HOME",
    "USER",
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper",
    "RAY_process_group_cleanup_enabled",
}


def spec(**resources: Any) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "steps": 1,
            "model": {"path": "/model"},
            "data": {"path": "/data.jsonl"},
            "reward": {"name": "match"},
            "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 2, "maxResponseTokens": 8, "tensorParallel": 2},
            "training": {"tensorParallel": 2},
            "resources": {"profile": "ascend-a2", "devicesPerNode": 2} | resources,
            "timeouts": {"startSeconds": 240},
        }
    )


@pytest.fixture
def npu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", "/usr/local/Ascend/ascend-toolkit/latest")
    monkeypatch.setattr(machine, "package_library", lambda mode: LIBRARY)


def test_compiled_code_is_loaded_from_no_folder_that_others_could_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert compiler_variables() == {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "rljob" / "inductor")}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert compiler_variables() == {}
    own = tmp_path / f".cache-{os.getuid()}"
    assert shared_cache(tmp_path) == str(own)
    own.chmod(0o755)
    assert shared_cache(tmp_path) == str(own), "as it was made before"
    own.chmod(0o775)
    assert shared_cache(tmp_path) is None
    assert "not this user's own folder" in caplog.text


@pytest.mark.parametrize("profile", ["ascend-a2", "ascend-a3", "cuda"])
@pytest.mark.usefixtures("npu_machine")
def test_processes_have_what_their_pods_would_give_them(profile: str) -> None:
    job = spec(profile=profile, tuning={"ompNumThreads": 3}, overrides={"environment": {"MINE": "yes"}})
    pods = {entry["name"]: entry.get("value") for entry in pod_environment(job, resolve(job), head=False)}
    for trainer in (True, False):
        own = machine_variables(job, trainer=trainer)
        assert own.get("LD_PRELOAD") == (LIBRARY if trainer else None)
        cache = own.get("ACL_OP_COMPILER_CACHE_DIR")
        assert cache is None or cache.startswith(str(Path.home()))
        in_pods = {name: COMPILE_CACHE if value == cache else value for name, value in own.items()}
        in_pods.pop("LD_PRELOAD", None)
        assert in_pods.pop(BACKEND_AUTOLOAD_VARIABLE) == "1"
        assert in_pods == {name: value for name, value in pods.items() if name not in OF_PODS}


@pytest.mark.usefixtures("npu_machine")
def test_threads_that_were_asked_for_come_before_the_profiles() -> None:
    assert machine_variables(spec(), trainer=True)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in machine_variables(spec(threadsPerDevice=8), trainer=True)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    with pytest.raises(UserError, match=r"ASCEND_TOOLKIT_HOME is not set in this shell; run `source .*set_env\.sh`"):
        check_machine(spec())
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", "/usr/local/Ascend")
    with pytest.raises(UserError, match=r"no library for preload mode here .* another spec\.memorySaver\.mode"):
        check_machine(spec())
    monkeypatch.setattr(machine, "package_library", lambda mode: LIBRARY)
    check_machine(spec())


def test_nothing_is_asked_of_a_machine_that_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.setenv(roles.COMPUTE_VARIABLE, "cpu")
    check_machine(spec())
    assert machine_variables(spec(), trainer=True) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("npu_machine")
def test_each_trainer_sees_one_device_and_its_engine_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray counts NPUs by CANN's `acl`; two of them are to be found here.
    (tmp_path / "acl.py").write_text(
        "class rt:\n    get_device_count = staticmethod(lambda: (2, 0))\n\n\nget_soc_name = lambda: 'Ascend910B1'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,6")
    # They say what they were given, and load nothing.
    monkeypatch.setattr(cluster_module, "TRAINER", replace(cluster_module.TRAINER, api=None))
    monkeypatch.setattr(cluster_module, "ENGINE", replace(cluster_module.ENGINE, api=None))
    job, stop = spec(), threading.Event()
    with embedded(job) as session:
        cluster = Cluster(job, tmp_path / "run", tmp_path, tmp_path / "run" / "checkpoints")
        calls = Calls(stop, lambda: None, cluster.death_of, lambda what: None)
        cluster.create(calls, 1, stop, session.scratch, {"SOME_TOKEN": "of the shell"})
        variable = device_kind(job.resources).visible_variable
        assert variable is not None
        trainers = calls.gather("start", cluster.trainers.variable(variable), 120)
        engines = calls.gather("start", cluster.engines.variable(variable), 120)
        preloads = calls.gather("start", cluster.trainers.variable("TMS_INIT_ENABLE"), 120)
        handed = calls.gather("start", cluster.trainers.variable("SOME_TOKEN"), 120)
        assert set(handed) == {"of the shell"}
        queues = calls.gather("start", cluster.trainers.variable("TASK_QUEUE_ENABLE"), 120)
        cluster.kill()
        assert (sorted(trainers), preloads, queues) == (["4", "6"], ["1", "1"], ["2", "2"])
        assert [sorted(shown.split(",")) for shown in engines] == [["4", "6"]]

        # No node can join a Ray of the job's own: it is told at once, not after startSeconds.
        with pytest.raises(UserError, match=r"devicesPerNode: the job needs .* 4 free NPU; this machine is .* 2 NPU"):
            reserve_devices(spec(devicesPerNode=4), stop, more_may_join=False)
    assert os.environ["ASCEND_RT_VISIBLE_DEVICES"] == "4,6"
