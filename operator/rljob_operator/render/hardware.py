"""The hardware of a job: its profile, with what the manifest says over it."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.profiles import PROFILES, HardwareProfile, HostMount
from rljob_api.profiles.ascend_a2 import DRIVER
from rljob_api.spec import ProfileOverrides, RLJobSpec
from rljob_api.tuning import resolved_tuning


def resolve(spec: RLJobSpec) -> HardwareProfile:
    """The job's profile with `resources.overrides` and `resources.tuning` over it."""
    profile = PROFILES[spec.resources.profile]
    given = spec.resources.overrides
    return replace(
        profile,
        resource_name=given.resource_name if profile.has_devices and given.resource_name else profile.resource_name,
        ray_resource=given.ray_resource if profile.has_devices and given.ray_resource else profile.ray_resource,
        runtime_class=given.runtime_class or profile.runtime_class,
        node_selector=given.node_selector if given.node_selector is not None else profile.node_selector,
        host_mounts=_host_mounts(profile, given),
        visible_devices_annotation=_annotation(spec, profile),
        tuning=resolved_tuning(spec),
    )


def _annotation(spec: RLJobSpec, profile: HardwareProfile) -> str | None:
    # Only MindCluster's scheduler writes the annotation; with any other one the variable would be empty (MindCluster,
    # api/ascend_job.md: it must be removed without Volcano's Ascend plugin).
    given = spec.resources.overrides.visible_devices_annotation
    if given is not None:
        return given
    if spec.scheduling.system != "MindCluster" or profile.mind_cluster is None:
        return None
    return profile.mind_cluster.visible_devices_annotation


def _host_mounts(profile: HardwareProfile, given: ProfileOverrides) -> tuple[HostMount, ...]:
    mounts = profile.host_mounts
    if given.host_mounts is not None:
        # Whether it is a file or a folder is known on the node alone.
        mounts = tuple(HostMount(path, "") for path in given.host_mounts)
    if given.driver_path is not None:
        folder = given.driver_path.rstrip("/")
        mounts = tuple(
            replace(mount, source=folder + mount.path[len(DRIVER) :])
            if mount.path == DRIVER or mount.path.startswith(f"{DRIVER}/")
            else mount
            for mount in mounts
        )
    return mounts
