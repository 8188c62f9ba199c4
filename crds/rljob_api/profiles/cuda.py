"""Servers with NVIDIA GPUs."""

from __future__ import annotations

from rljob_api.profiles.base import NO_ASYNC_SCHEDULING, HardwareProfile

PROFILE = HardwareProfile(
    name="cuda",
    order=60,
    kind="cuda",
    chip=None,
    # NVIDIA's device plugin; KubeRay and Ray know it.
    resource_name="nvidia.com/gpu",
    ray_resource="GPU",
    devices_per_node=16,
    cpu_per_device=12,
    # chosen, as for NPUs.
    memory_per_device_gib=96,
    shared_memory_per_device_gib=8,
    head_cpu="8",
    head_memory="32Gi",
    # NVIDIA's runtime shows a container without the variable every device of the node where it is the default.
    head_environment={"NVIDIA_VISIBLE_DEVICES": "void"},
    refused_engine_args={"async_scheduling": NO_ASYNC_SCHEDULING},
    allocator_variable="PYTORCH_CUDA_ALLOC_CONF",
    # Ray: nvidia_gpu.py of 2.60.
    explicit_devices_variable="RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    restricted=True,
)
