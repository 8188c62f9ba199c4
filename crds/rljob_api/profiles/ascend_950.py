"""Atlas 850 and 950 SuperPoD servers."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.profiles.ascend_a2 import PROFILE as ASCEND_A2
from rljob_api.profiles.base import MindCluster

PROFILE = replace(
    ASCEND_A2,
    name="ascend-950",
    order=30,
    # The smaller of the two.
    chip="950PR",
    # MindCluster: "A5 and other".
    resource_name="huawei.com/npu",
    # Atlas 850 and 950 SuperPoD.
    devices_per_node=8,
    node_selector={"accelerator": "huawei-npu"},
    mind_cluster=MindCluster(
        visible_devices_annotation="huawei.com/npu", ring_controller="ascend-npu", super_pods=True
    ),
)
