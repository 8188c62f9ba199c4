"""Volumes of the pods: the node's files, shared memory, compiled operators, and the user's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import PurePosixPath

from rljob_api.profiles import HardwareProfile
from rljob_api.spec import RLJobSpec, VolumeSpec
from rljob_operator.kubernetes_objects import Manifest, blocks_of
from rljob_operator.render.errors import RenderError
from rljob_operator.render.names import check_name, check_path, check_sub_path
from rljob_operator.render.settings import short
from rljob_operator.render.variables import COMPILE_CACHE

OWN_PREFIX = "rljob-"
RUN_ROOT = "/rljob"
"""Folder of the runs where `checkpoint.path` names none."""
_NOT_SHARED = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "image", "ephemeral")


@dataclass
class Volumes:
    """`volumes` of a pod and `volumeMounts` of its Ray container."""

    fields: list[str] = dataclasses.field(default_factory=list)
    """Field of the manifest for each mount, for errors."""
    volumes: list[Manifest] = dataclasses.field(default_factory=list)
    mounts: list[Manifest] = dataclasses.field(default_factory=list)

    def add(self, field: str, name: str, path: str, source: Manifest, **mount: str | bool) -> None:
        """Add a volume that is mounted once."""
        self.fields.append(field)
        self.volumes.append({"name": name, **source})
        self.mounts.append({"name": name, "mountPath": path, **mount})


def head_volumes(spec: RLJobSpec, shared_memory: str) -> Volumes:
    """The head's: no devices, hence none of the node's files."""
    found = Volumes()
    _add_shared_memory(found, shared_memory)
    _add_given(found, spec)
    return found


def worker_volumes(spec: RLJobSpec, profile: HardwareProfile, shared_memory: str) -> Volumes:
    """A worker's."""
    found = Volumes()
    _add_shared_memory(found, shared_memory)
    for i, mount in enumerate(profile.host_mounts):
        at = f"spec.resources.overrides.hostMounts[{i}]"
        host = {"path": mount.source or mount.path} | ({"type": mount.kind} if mount.kind else {})
        found.add(at, f"{OWN_PREFIX}host-{i}", mount.path, {"hostPath": host}, readOnly=True)
    if profile.tuning.compile_cache:
        folder = profile.tuning.compile_cache_path
        source_of = {"hostPath": {"path": folder, "type": "DirectoryOrCreate"}} if folder else {"emptyDir": {}}
        found.add("spec.resources.tuning.compileCache", f"{OWN_PREFIX}operators", COMPILE_CACHE, source_of)
    _add_given(found, spec)
    return found


def _add_shared_memory(found: Volumes, size: str) -> None:
    source = {"emptyDir": {"medium": "Memory", "sizeLimit": size}}
    found.add("spec.storage.sharedMemory", f"{OWN_PREFIX}shared-memory", "/dev/shm", source)


def _add_given(found: Volumes, spec: RLJobSpec) -> None:
    for i, volume in enumerate(spec.storage.volumes):
        at = f"spec.storage.volumes[{i}]"
        mount: dict[str, str | bool] = {}
        if volume.sub_path is not None:
            mount["subPath"] = volume.sub_path
        if volume.read_only:
            mount["readOnly"] = True
        found.add(f"{at}.mountPath", volume.name, volume.mount_path, _source(volume), **mount)


def check_volumes(spec: RLJobSpec, profile: HardwareProfile, shared_memory: str) -> None:
    """Refuse what cannot be mounted, and two things in one place."""
    for i, mount in enumerate(profile.host_mounts):
        check_path(f"spec.resources.overrides.hostMounts[{i}]", mount.path)
        check_path("spec.resources.overrides.driverPath", mount.source or mount.path)
    if profile.tuning.compile_cache:
        check_path("spec.resources.tuning.compileCachePath", profile.tuning.compile_cache_path)
    for i, volume in enumerate(spec.storage.volumes):
        _check(volume, f"spec.storage.volumes[{i}]")
    found = worker_volumes(spec, profile, shared_memory)
    paths = [_path_of(mount) for mount in found.mounts]
    for i, path in enumerate(paths):
        if path in paths[:i]:
            hint = "; storage.sharedMemory sizes it" if path == PurePosixPath("/dev/shm") else ""
            text = short(str(found.mounts[i]["mountPath"]))
            raise RenderError(found.fields[i], f"{text} is mounted already{hint}; take another place")


def _check(volume: VolumeSpec, at: str) -> None:
    check_path(f"{at}.mountPath", volume.mount_path)
    check_path(f"{at}.hostPath", volume.host_path)
    check_sub_path(f"{at}.subPath", volume.sub_path)
    check_name(f"{at}.claim", volume.claim)
    if volume.name.startswith(OWN_PREFIX):
        raise RenderError(f"{at}.name", f"{short(volume.name)}: names that begin with {OWN_PREFIX} are the operator's")


def _source(volume: VolumeSpec) -> Manifest:
    if volume.claim is not None:
        return {"persistentVolumeClaim": {"claimName": volume.claim}}
    if volume.host_path is not None:
        # A folder that is missing must fail the pod: an empty one in its place would take checkpoints and lose them.
        return {"hostPath": {"path": volume.host_path, "type": "Directory"}}
    return dict(volume.source or {})


def check_run_folder(spec: RLJobSpec, head: Manifest, worker: Manifest) -> None:
    """Refuse a run folder that driver and trainers do not share: both write the checkpoints, a restart reads them.

    Args:
        spec: the job.
        head: the head's pod spec as it was rendered, the user's template included.
        worker: a worker's.

    Raises:
        RenderError: naming `checkpoint.path`.
    """
    root = spec.checkpoint.path or RUN_ROOT
    check_path("spec.checkpoint.path", root)
    right = (
        "driver and trainers are in different pods and need the same folder for checkpoints: "
        "put it into a volume of spec.storage.volumes that all nodes can mount"
    )
    found = {}
    for role, pod in (("head", head), ("worker", worker)):
        mount = _mount_of(root, pod)
        if mount is None:
            default = "" if spec.checkpoint.path else f" (the default is {RUN_ROOT})"
            raise RenderError("spec.checkpoint.path", f"{short(root)}{default} is in no volume of the {role}; {right}")
        if mount.get("readOnly"):
            raise RenderError("spec.checkpoint.path", f"{short(root)} is mounted read-only in the {role}; {right}")
        volume = next((v for v in blocks_of(pod, "volumes") if v.get("name") == mount.get("name")), {})
        if any(kind in volume for kind in _NOT_SHARED):
            raise RenderError("spec.checkpoint.path", f"{short(root)} is in a volume of the {role} alone; {right}")
        found[role] = {key: value for key, value in volume.items() if key != "name"}, mount.get("subPath")
    if found["head"] != found["worker"]:
        raise RenderError("spec.checkpoint.path", f"{short(root)} is another volume in head and worker; {right}")


def _mount_of(path: str, pod: Manifest) -> Manifest | None:
    ray = blocks_of(pod, "containers")[0]
    mounts = [mount for mount in blocks_of(ray, "volumeMounts") if PurePosixPath(path).is_relative_to(_path_of(mount))]
    return max(mounts, key=lambda mount: len(_path_of(mount).parts), default=None)


def _path_of(mount: Manifest) -> PurePosixPath:
    return PurePosixPath(str(mount["mountPath"]))
