"""Clusters in which HAMi hands out the NPUs."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.profiles.ascend_a2 import PROFILE as ASCEND_A2
from rljob_api.profiles.base import MindCluster

PROFILE = replace(
    ASCEND_A2,
    name="hami",
    order=50,
    # `resources.overrides.resourceName` tells another one.
    chip="910B3",
    # HAMi's device plugin has a resource for each chip: 910A, 910B2, 910B3, 910B4, 910B4-1, 910C.
    resource_name="huawei.com/Ascend910B3",
    devices_per_node=16,
    # HAMi's documentation: nodes are labelled ascend=on, and its runtime class mounts the driver.
    node_selector={"ascend": "on"},
    runtime_class="ascend",
    host_mounts=(),
    # HAMi would give the init container devices of its own.
    init_containers_share_devices=False,
    mind_cluster=MindCluster(),
)
