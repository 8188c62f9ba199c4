"""Roles: the kinds of processes that a job has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rljob_api import RLJobSpec, roles
from rljob_api.spec import EnvironmentSpec
from rljob_worker.cluster.placement import Placement
from rljob_worker.engine.engine import Engine
from rljob_worker.engine.environment import engine_environment
from rljob_worker.engine.judge import JudgeEngine
from rljob_worker.trainer.environment import trainer_environment
from rljob_worker.trainer.trainer import Trainer

Api = TypeVar("Api")


@dataclass(frozen=True, slots=True)
class Role(Generic[Api]):
    """A kind of process.

    Attributes:
        name: its processes are `NAME-0`, `NAME-1` and so on.
        api: class of the object that each process makes and whose methods are called; None: it has none.
        devices: the job's devices that each process spans, in the order of their numbers.
        environment: variables that it needs, of a job and the folder for its caches (None: the libraries' own).
        users: variables of the manifest for this role alone.
        memory_saver: whether the memory saver is loaded into it.
    """

    name: str
    api: type[Api] | None
    devices: Callable[[Placement, RLJobSpec], Sequence[range]]
    environment: Callable[[RLJobSpec, str | None], Mapping[str, str]] | None = None
    users: Callable[[EnvironmentSpec], Mapping[str, str]] = lambda given: {}
    memory_saver: bool = False


def _trainers(placement: Placement, spec: RLJobSpec) -> list[range]:
    return [range(device, device + 1) for device in placement.trainers(spec.training)]


def _engines(placement: Placement, spec: RLJobSpec) -> list[range]:
    return placement.engines(spec.rollout.tensor_parallel)


def _judges(placement: Placement, spec: RLJobSpec) -> list[range]:
    return placement.judges()


def _without_trainers(placement: Placement, spec: RLJobSpec) -> list[range]:
    trained = placement.trainers(spec.training)
    return [device for device in placement.engines(1) if device.start not in trained]


def _trainer_variables(spec: RLJobSpec, cache: str | None) -> dict[str, str]:
    return trainer_environment(spec) | roles.trainer_variables(spec)


def _engine_variables(spec: RLJobSpec, cache: str | None) -> dict[str, str]:
    return engine_environment(spec, cache_folder=cache) | roles.engine_variables(spec)


TRAINER = Role("trainer", Trainer, _trainers, _trainer_variables, users=lambda given: given.trainer, memory_saver=True)
"""One rank of the training backend on each device."""
ENGINE = Role("engine", Engine, _engines, _engine_variables, users=lambda given: given.rollout)
"""One vLLM engine on each tensor-parallel group of devices."""
JUDGE = Role("judge", JudgeEngine, _judges, _engine_variables, users=lambda given: given.rollout)
"""A judge's model on each device of its own, or by turns with the others on each of theirs."""
ONLOOKER: Role[object] = Role("onlooker", None, _without_trainers)
"""A process that shows which device Ray gives it, where no trainer does. What only an engine needs would keep Ray from
showing it a device."""
