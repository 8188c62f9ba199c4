"""The memory that a job will need."""

from __future__ import annotations

from collections.abc import Callable

from rljob_api import derived
from rljob_api.hardware import device_memory
from rljob_api.spec import RLJobSpec
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.trained import TrainedModel
from rljob_worker.planning.job_shape import job_shape, largest_micro_batch
from rljob_worker.planning.memory import Planner
from rljob_worker.planning.tables import MemoryPlan
from rljob_worker.planning.two_groups import TwoGroupsPlanner

MAX_LENGTH = 2**24
"""Beyond what a manifest can ask for."""


def plan_memory(
    spec: RLJobSpec, model: TrainedModel, *, device_bytes: int | None = None, node_bytes: int | None = None
) -> MemoryPlan:
    """Plan a job's memory.

    Args:
        spec: the job.
        model: its model.
        device_bytes: memory of a device; default: the profile's, None where that says nothing.
        node_bytes: host memory of a worker pod; default: the job's or the profile's.

    Raises:
        UserError: sizes that do not fit the model or the devices.
    """
    job = job_shape(spec, model)
    if device_bytes is None and (known := device_memory(spec)) is not None:
        device_bytes = known.nbytes
    batch = largest_micro_batch(spec, model, job)
    kind = TwoGroupsPlanner if derived.divides_devices(spec) else Planner
    planner = kind(spec, model, job, batch, device_bytes)
    devices, hosts = planner.device_tables(), planner.host_tables(node_bytes)
    longest = None
    if device_bytes is not None and isinstance(model, ModelConfig):
        longest = _longest(lambda length: _fits(planner, device_bytes, length))
    handed, whole = planner.handed_over, planner.of_model
    return MemoryPlan(job, planner.engine, batch, devices, hosts, handed, whole, longest)


def _fits(planner: Planner, device_bytes: int, length: int) -> bool:
    """Whether a sequence of so many tokens, as good as all of them a response, can be passed as a micro-batch."""
    phases = (
        phase
        for table in planner.with_sequence(length).device_tables()
        for phase in table.phases
        if "activations" in phase.components
    )
    return all(phase.total <= device_bytes for phase in phases)


def _longest(fits: Callable[[int], bool]) -> int:
    """The greatest length that fits, to a thousandth; 0 where none does."""
    fitting, beyond = 0, 1024
    while beyond < MAX_LENGTH and fits(beyond):
        fitting, beyond = beyond, 2 * beyond
    while beyond - fitting > max(1, fitting // 1000):
        middle = (fitting + beyond) // 2
        fitting, beyond = (middle, beyond) if fits(middle) else (fitting, middle)
    return fitting
