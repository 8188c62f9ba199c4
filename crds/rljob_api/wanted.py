"""Demands of a job on each of its worker nodes, to which `rljob doctor` holds its findings.

The operator hands it to the doctor in the pods, so it holds nothing that may change while a job has devices: another
pod template would make Kueue stop the job.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from rljob_api import derived, roles
from rljob_api.derived import NodeGroup
from rljob_api.profiles import PROFILES
from rljob_api.spec import MemorySaverMode, Profile, RLJobSpec

DOCTOR = "rljob-doctor"
"""Name of the init container that examines a worker pod."""
WANTED_VARIABLE = "RLJOB_DOCTOR_WANTED"
"""Variable with the `Wanted` as JSON in the doctor's init container."""


class Wanted(BaseModel):
    """Demands on a node; fields that are None or empty are not judged."""

    model_config = ConfigDict(alias_generator=to_camel, frozen=True, populate_by_name=True, extra="ignore")

    profile: Profile
    nodes: int = 1
    devices: int | None = None
    """Devices of this node that the processes see; None: the container is given none to look at."""
    memory_saver: MemorySaverMode = MemorySaverMode.OFF
    memory_fraction: float | None = None
    """Share of a device's memory that the engine takes."""
    shared_memory: str | None = None
    """Size that the job gives /dev/shm, as a quantity."""
    staging_bytes: int = 0
    """Bytes of /dev/shm that the weight hand-over takes at most."""
    model: str | None = None
    """The model's folder, which must be there on every node."""
    runs: str | None = None
    """Folder of the checkpoints: the same storage on every node. It is made when the first run begins."""
    trainer: Mapping[str, str] = {}
    """Environment of a trainer beyond its pod's."""
    rollout: Mapping[str, str] = {}
    """Environment of an engine beyond its pod's."""

    @classmethod
    def of(cls, spec: RLJobSpec, group: NodeGroup | None = None) -> Wanted:
        """Demands of a job on the nodes of one of its groups; on its largest where none is given."""
        on_cpu = not PROFILES[spec.resources.profile].has_devices
        given = spec.environment
        return cls(
            profile=spec.resources.profile,
            nodes=derived.nodes(spec),
            devices=derived.devices_per_node(spec) if group is None else group.devices,
            memory_saver=MemorySaverMode.OFF if on_cpu else spec.memory_saver.mode,
            memory_fraction=None if on_cpu else spec.rollout.memory_fraction,
            shared_memory=spec.storage.shared_memory,
            # On the CPU the two staging slots of a node lie in /dev/shm.
            staging_bytes=2 * spec.weight_sync.bucket_bytes if on_cpu and derived.has_slots(spec) else 0,
            # Anything else is a name in a model hub, or relative to where the driver runs.
            model=_absolute(spec.model.path),
            runs=_absolute(spec.checkpoint.path),
            trainer=roles.trainer_variables(spec) | given.variables | given.trainer,
            rollout=roles.engine_variables(spec) | given.variables | given.rollout,
        )


def _absolute(path: str | None) -> str | None:
    return path if path is not None and path.startswith("/") else None
