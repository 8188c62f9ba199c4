"""Atlas A2 servers: 910B, one die a package. The other Ascend profiles are this one with changes."""

from __future__ import annotations

import dataclasses

from rljob_api.profiles.base import (
    BACKEND_AUTOLOAD_VARIABLE,
    NO_ASYNC_SCHEDULING,
    HardwareProfile,
    HostMount,
    MindCluster,
    Tuning,
)

DRIVER = "/usr/local/Ascend/driver"
"""Folder of the Ascend driver in the pod, and on the node unless `overrides.driverPath` says otherwise."""

_HEAD = {
    # MindCluster: switches the Docker runtime's hook off, so that a pod without devices gets none.
    "ASCEND_VISIBLE_DEVICES": "void",
    # The head has no libraries of the driver, and uses no device.
    BACKEND_AUTOLOAD_VARIABLE: "0",
}
_MOUNTS = (
    # ROLL mounts these five; MindCluster's job YAML mounts driver and add-ons although its runtime mounts driver/lib64.
    # The whole driver folder holds `tools` with hccn_tool, which the runtime's list lacks.
    HostMount(DRIVER, "Directory"),
    # Newer drivers have no add-ons; an empty folder does no harm.
    HostMount("/usr/local/Ascend/add-ons", "DirectoryOrCreate"),
    HostMount("/usr/local/dcmi", "Directory"),
    HostMount("/usr/local/bin/npu-smi", "File"),
    HostMount("/etc/ascend_install.info", "File"),
    # hccn_tool reads the NPUs' network addresses here (vllm-ascend, multi-node guide).
    HostMount("/etc/hccn.conf", "File"),
)
_TUNING = Tuning(
    # ROLL: 2; torch_npu's default is 1. Level 2 moves workspace allocation to a thread of its own, which the preload
    # hook covers only because TMS_INIT_ENABLE holds for all threads; `torch` mode lowers it to 1 (render/hardware.py).
    task_queue_enable=2,
    # ROLL: 2 (fine), in processes that see all devices of a server. Here each sees one, as number 0: torch_npu would
    # give all of them the same cores, and their main threads core 0 (NPUAffinityController.cpp).
    cpu_affinity=None,
    # ROLL, and torch_npu's default.
    multi_stream_memory_reuse=1,
    # ROLL; off by default in torch_npu.
    combined_enable=True,
    # ROLL: 1.
    omp_num_threads=1,
    # ROLL: enable, 5000 MiB; the first request otherwise compiles operators for minutes after each start.
    compile_cache=True,
    compile_cache_mib=5000,
    # ROLL: ERROR for CANN (3), ASDOPS and ATB.
    log_level="ERROR",
)

PROFILE = HardwareProfile(
    name="ascend-a2",
    order=10,
    kind="npu",
    chip="910B1",
    # MindCluster: one name for 910A, 910B (A2) and A3.
    resource_name="huawei.com/Ascend910",
    # Ray: _private/accelerators/npu.py.
    ray_resource="NPU",
    # Atlas 200T A2 Box16; most servers (800T A2) have 8.
    devices_per_node=16,
    # chosen: 128 of the 192 cores of an 800T A2.
    cpu_per_device=16,
    # chosen: trainer weights, their pinned backup while asleep (31 GiB a device in vime 255), optimizer in host memory.
    memory_per_device_gib=96,
    # vllm-ascend's CI takes 512 GiB of /dev/shm a pod, of which it uses a fraction.
    shared_memory_per_device_gib=8,
    head_cpu="8",
    head_memory="32Gi",
    # MindCluster, node labels: 8-device A2 servers. Without MindCluster's labels: `overrides.nodeSelector: {}`.
    node_selector={"accelerator-type": "module-910b-8"},
    host_mounts=_MOUNTS,
    head_environment=_HEAD,
    # Weights in the NZ layout cannot be updated in place.
    engine_environment={"VLLM_ASCEND_ENABLE_NZ": "0"},
    returns_experts=False,
    verifies_drafts=False,
    refused_engine_args={
        # vllm-ascend 13012, in 0.26: `_expert_map` and `log2phy` lie in the pool that level-2 sleep gives back.
        "enable_expert_parallel": "vllm-ascend 0.23 loses the experts' places when the engine sleeps",
        "enable_eplb": "vllm-ascend 0.23 loses the experts' places when the engine sleeps",
        "async_scheduling": NO_ASYNC_SCHEDULING,
    },
    allocator_variable="PYTORCH_NPU_ALLOC_CONF",
    # Ray: npu.py of 2.60.
    explicit_devices_variable="RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    # HwHiAiUser's, as the driver's installer makes it.
    device_group=1000,
    needs_cann=True,
    uses_hccl=True,
    visible_devices_variable="ASCEND_VISIBLE_DEVICES",
    mind_cluster=MindCluster(
        visible_devices_annotation="huawei.com/Ascend910", ring_controller="ascend-910b", schedule_policy="chip8-node8"
    ),
    tuning=_TUNING,
    tunable=tuple(field.name for field in dataclasses.fields(Tuning)),
)
