"""No devices: a laptop, a test cluster."""

from __future__ import annotations

from rljob_api.profiles.base import HardwareProfile

PROFILE = HardwareProfile(
    name="cpu",
    order=70,
    kind="cpu",
    chip=None,
    resource_name=None,
    ray_resource=None,
    # chosen: two processes for each, and servers have a few hundred cores.
    devices_per_node=512,
    # chosen: two processes a device.
    cpu_per_device=2,
    # chosen for small models: two Python processes with torch a device, and vLLM's KV cache of 1 GiB.
    memory_per_device_gib=8,
    shared_memory_per_device_gib=2,
    head_cpu="2",
    head_memory="6Gi",
    restricted=True,
)
