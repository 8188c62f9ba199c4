"""A node that looks as if it had Ascend NPUs: kubelet's device plugin, the driver's files, a library to preload."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from kube import wait_until
from node_cluster import NODE
from programs import program
from whole_system import WholeSystem

from rljob_api.profiles import PROFILES
from rljob_api.roles import MEMORY_SAVER_LIBRARY
from rljob_api.spec import Profile

RESOURCE = "huawei.com/Ascend910"
_REGISTER_SECONDS = 60.0
_NODE_FILES = (
    "/usr/local/Ascend/driver/version.info", "/usr/local/Ascend/driver/tools/hccn_tool", "/usr/local/dcmi/libdcmi.so",
    "/usr/local/bin/npu-smi", "/etc/ascend_install.info", "/etc/hccn.conf",
)  # fmt: skip


def add_devices(system: WholeSystem, count: int) -> None:
    """Have the node advertise so many devices, and give it the label and the files that a real one would have."""
    selector = PROFILES[Profile.ASCEND_A2].node_selector
    system.kube.patch("Node", None, NODE, {"metadata": {"labels": dict(selector)}})
    folder = system.folder / "devices"
    folder.mkdir()
    for number in range(count):
        (folder / f"davinci{number}").write_text(f"device {number}\n")
    for file in _NODE_FILES:
        system.cluster.execute("sh", "-c", f"mkdir -p {Path(file).parent} && echo {file} > {file}")
    command = [str(program("device-plugin")), RESOURCE, str(count), str(folder)]
    system.cluster.keep("device-plugin", command, lambda: True)

    def advertised() -> bool:
        node = system.kube.get("Node", None, NODE)
        return bool(node["status"]["allocatable"].get(RESOURCE) == str(count))

    assert wait_until(advertised, _REGISTER_SECONDS, 0.5), system.kube.get("Node", None, NODE)["status"]


def preload_library(folder: Path) -> Path:
    """Compile the library that stands in for the memory saver's hook."""
    folder.mkdir()
    library = folder / Path(MEMORY_SAVER_LIBRARY).name
    source = Path(__file__).with_name("preloaded.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    return library


def as_ascend_job(manifest: dict[str, Any], library: Path) -> dict[str, Any]:
    """Turn a job for the CPU into one for `ascend-a2` that computes on the CPU all the same."""
    spec = manifest["spec"]
    spec["resources"] |= {"profile": "ascend-a2", "nodes": 1, "devicesPerNode": 1, "threadsPerDevice": 1}
    spec["environment"] = {
        "variables": {
            "RLJOB_COMPUTE_DEVICE": "cpu",
            "ASCEND_TOOLKIT_HOME": "/tmp",  # the image has no CANN, and none is needed
            "RLJOB_TEST_PRELOADED": "/shared/preloaded",
        }
    }
    inside = str(Path(MEMORY_SAVER_LIBRARY).parent)
    hook = {"name": "hook", "mountPath": inside, "hostPath": str(library.parent), "readOnly": True}
    spec["storage"]["volumes"].append(hook)
    return manifest
