"""Environment of trainers and engines."""

from __future__ import annotations

import itertools

import pytest
from manifests import manifest

from rljob_api import roles
from rljob_api.spec import Profile, RLJobSpec
from rljob_api.validation import load_manifest

DEVICES = [profile for profile in Profile if profile is not Profile.CPU]


def spec(*settings: str) -> RLJobSpec:
    return load_manifest(manifest(*settings)).spec


def test_cpu_needs_nothing() -> None:
    for mode in ("preload", "torch", "off"):
        job = spec(f"memorySaver.mode='{mode}'")
        assert roles.trainer_variables(job) == roles.engine_variables(job) == {}


@pytest.mark.parametrize("profile", DEVICES)
@pytest.mark.parametrize("mode", ["preload", "torch", "off"])
def test_memory_saver(profile: Profile, mode: str) -> None:
    job = spec(f"resources.profile={profile.value}", f"memorySaver.mode='{mode}'")
    trainer, engine = roles.trainer_variables(job), roles.engine_variables(job)
    allocator = "PYTORCH_CUDA_ALLOC_CONF" if profile is Profile.CUDA else "PYTORCH_NPU_ALLOC_CONF"
    assert trainer[allocator] == engine[allocator] == "expandable_segments:False"
    assert not [name for name in engine if name.startswith("TMS_") or name == "LD_PRELOAD"]
    saver = {name: value for name, value in trainer.items() if name.startswith("TMS_") or name == "LD_PRELOAD"}
    if mode == "preload":
        library = saver.pop("LD_PRELOAD")
        assert library.endswith("/torch_memory_saver_hook_mode_preload.abi3.so")
        assert not set(library) & set(": ")
        assert saver == {"TMS_HOOK_MODE": "preload", "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    else:
        assert saver == ({"TMS_HOOK_MODE": "torch"} if mode == "torch" else {})


@pytest.mark.parametrize("profile", DEVICES)
def test_device_lists_are_explicit_where_an_engine_spans_devices(profile: Profile) -> None:
    name = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
    if profile is Profile.CUDA:
        name = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    of_two = spec(f"resources.profile={profile.value}", "rollout.tensorParallel=2")
    of_one = spec(f"resources.profile={profile.value}", "rollout.tensorParallel=1")
    assert roles.engine_variables(of_two)[name] == "1"
    assert name not in roles.engine_variables(of_one)
    assert name not in roles.trainer_variables(of_two)


@pytest.mark.parametrize("profile", DEVICES)
def test_engines_that_capture_graphs_have_a_task_queue_that_they_are_captured_with(profile: Profile) -> None:
    graphs = [f"resources.profile={profile.value}", "rollout.graphMode=true"]
    name = "TASK_QUEUE_ENABLE"
    on_npu = profile is not Profile.CUDA
    assert roles.engine_variables(spec(*graphs)).get(name) == ("1" if on_npu else None)
    assert name not in roles.engine_variables(spec(graphs[0])), "the pod's"
    assert name not in roles.engine_variables(spec(*graphs, "resources.tuning.taskQueueEnable=0"))
    assert name not in roles.trainer_variables(spec(*graphs))


def test_ray_reads_the_names_of_the_opt_outs() -> None:
    npu = pytest.importorskip("ray._private.accelerators.npu")
    nvidia = pytest.importorskip("ray._private.accelerators.nvidia_gpu")
    for profile, name in (
        ("ascend-a2", npu.NOSET_ASCEND_RT_VISIBLE_DEVICES_ENV_VAR),
        ("cuda", nvidia.NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR),
    ):
        assert name in roles.engine_variables(spec(f"resources.profile={profile}", "rollout.tensorParallel=2"))


def test_colocated_ports_never_meet() -> None:
    name, other = "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"
    auto = spec("resources.profile=ascend-a2")
    for role in (roles.trainer_variables(auto), roles.engine_variables(auto)):
        assert role[name] == role[other] == "auto"
    given = spec(
        "resources.profile=ascend-a3",
        "hccl.trainerPorts={host: {first: 60000, last: 60050}, device: {first: 61000, last: 61050}}",
        "hccl.rolloutPorts={host: {first: 60051, last: 60100}}",
    )
    assert roles.trainer_variables(given)[name] == "60000-60050"
    assert roles.trainer_variables(given)[other] == "61000-61050"
    assert roles.engine_variables(given)[name] == "60051-60100"
    assert roles.engine_variables(given)[other] == "auto"
    cuda = spec("resources.profile=cuda")
    assert not [key for key in roles.trainer_variables(cuda) | roles.engine_variables(cuda) if key.startswith("HCCL")]


def test_engine_settings_of_vllm() -> None:
    for profile, mode in itertools.product(DEVICES, ("preload", "off")):
        engine = roles.engine_variables(spec(f"resources.profile={profile.value}", f"memorySaver.mode='{mode}'"))
        assert engine["VLLM_SERVER_DEV_MODE"] == "1"
        assert engine.get("VLLM_ASCEND_ENABLE_NZ") == (None if profile is Profile.CUDA else "0")
