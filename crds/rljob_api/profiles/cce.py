"""Huawei Cloud CCE."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.profiles.ascend_a2 import DRIVER
from rljob_api.profiles.ascend_a2 import PROFILE as ASCEND_A2
from rljob_api.profiles.base import HostMount, MindCluster

PROFILE = replace(
    ASCEND_A2,
    name="cce",
    order=40,
    # vllm-ascend's CI on CCE has A3 nodes.
    chip="910C",
    # Huawei Cloud CCE's AI Suite; vllm-ascend CI asks for 16 of them on A3 nodes.
    resource_name="huawei.com/ascend-1980",
    devices_per_node=16,
    cpu_per_device=12,
    # The resource is on NPU nodes alone; label values of CCE (accelerator/huawei-npu) differ by node type.
    node_selector={},
    # vllm-ascend CI on CCE mounts the tools alone: the add-on's runtime brings the driver.
    host_mounts=(HostMount(f"{DRIVER}/tools", "Directory"),),
    mind_cluster=MindCluster(),
)
