"""Paths of a job beside each other: one that is used for two purposes, or that nothing can be written to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from rljob_api.derived import data_sources, held_out_sources
from rljob_api.rules.findings import Check, Finding, path_faults, unprintable
from rljob_api.rules.places import rewards_of
from rljob_api.spec import CheckpointSpec, RewardSpec, RLJobSpec, VolumeSpec

_OF_THE_KERNEL = ("/proc", "/sys", "/dev")
_OF_THE_IMAGE = ("/bin", "/etc", "/lib", "/lib64", "/sbin", "/usr")


def _absolute(path: str | None) -> PurePosixPath | None:
    """A path as its parts; None where it is relative, or below a home folder that the manifest does not tell."""
    return PurePosixPath("/" + path.lstrip("/")) if path is not None and path.startswith("/") else None


def _checkpoints(spec: Any) -> Iterator[Finding]:
    """A place for checkpoints that holds something else, or that cannot be written."""
    path, at = _absolute(spec.checkpoint.path), ("checkpoint", "path")
    if path is None:
        return
    taken = {"model.path": spec.model.path}
    for sources in (data_sources(spec), held_out_sources(spec)):
        taken |= {f"{place}.path": source.path for place, source in sources}
    for field, other in taken.items():
        if _absolute(other) == path:
            yield Finding(at, f"is {field} too", "a folder of its own")
            return
    if path == PurePosixPath("/"):
        yield Finding(at, "is no folder of a job's own", "a folder in a volume, or on a disk")


def _written(spec: Any) -> Iterator[Finding]:
    """The folder of checkpoints named as one that a reward may write; one above it is meant for others in it."""
    path = _absolute(spec.checkpoint.path)
    if path is None:
        return
    for at, reward in rewards_of(spec):
        for index, folder in enumerate(reward.write_paths):
            if folder.strip("/") and _absolute(folder) == path:
                wrong = "is checkpoint.path: a reward, which runs what a model wrote, could change checkpoints"
                yield Finding((*at, "writePaths", index), wrong, "a folder of its own")


def _paths(reward: Any) -> Iterator[Finding]:
    for field, paths in (("readPaths", reward.read_paths), ("writePaths", reward.write_paths)):
        for index, path in enumerate(paths):
            if unprintable(path) or path != path.strip():
                yield Finding((field, index), "holds control characters, or blanks around it", "a path")
            elif field == "writePaths" and path.strip("/") == "":
                yield Finding((field, index), "lets a reward write to everything", "the folders that it needs")


def _mount(volume: Any) -> Iterator[Finding]:
    path = volume.mount_path.rstrip("/")
    # Pods of devices have the node's own /sys, /dev and libraries there, and lxcfs has files in /proc.
    of_the_node = volume.host_path is not None or "hostPath" in (volume.source or {})
    if path in _OF_THE_KERNEL and not of_the_node:
        yield Finding(("mountPath",), "is the kernel's, and would be hidden by a volume", "another folder")
    elif path in _OF_THE_IMAGE and not of_the_node:
        yield Finding(("mountPath",), "would hide the programs or settings of the image", "another folder")
    for field, value in (("mountPath", volume.mount_path), ("hostPath", volume.host_path)):
        if value is not None and value != value.strip():
            yield Finding((field,), "has blanks around it", "a path without them")


def _checkpoint(checkpoint: Any) -> Iterator[Finding]:
    yield from path_faults("path", checkpoint.path, "a folder that all nodes see", set())


FOLDER_CHECKS: dict[type, tuple[Check, ...]] = {
    RLJobSpec: (_checkpoints, _written),
    RewardSpec: (_paths,),
    VolumeSpec: (_mount,),
    CheckpointSpec: (_checkpoint,),
}
