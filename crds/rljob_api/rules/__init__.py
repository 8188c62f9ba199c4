"""Rules between fields. Each is written once: its CEL goes into the CRD, its check runs where a manifest is read."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from enum import Enum
from typing import Any

from rljob_api.base import ApiModel
from rljob_api.blocks import BlockField, fields_of
from rljob_api.rules.addresses import ADDRESS_CHECKS
from rljob_api.rules.backends import BACKENDS
from rljob_api.rules.changes import CHANGES, MUTABLE_FIELDS, RESUMABLE_FIELDS, without_changeable
from rljob_api.rules.core import Rule
from rljob_api.rules.critic import CRITIC
from rljob_api.rules.data import MODEL_AND_DATA
from rljob_api.rules.deadlines import DEADLINE_CHECKS
from rljob_api.rules.devices import DEVICE_CHECKS, DEVICES
from rljob_api.rules.distill import DISTILL, DISTILL_CHECKS
from rljob_api.rules.environments import ENVIRONMENT_CHECKS
from rljob_api.rules.episodes import EPISODE_CHECKS, EPISODES
from rljob_api.rules.findings import Check, Finding
from rljob_api.rules.folders import FOLDER_CHECKS
from rljob_api.rules.handover import HANDOVER_CHECKS
from rljob_api.rules.infrastructure import CLUSTER, NETWORK, PARALLELISM
from rljob_api.rules.judges import JUDGE_CHECKS, JUDGES
from rljob_api.rules.kubernetes_objects import OBJECT_CHECKS
from rljob_api.rules.learning import LEARNING
from rljob_api.rules.lengths import LENGTH_CHECKS
from rljob_api.rules.lists import LIST_CHECKS
from rljob_api.rules.model_config import MODEL_CHECKS
from rljob_api.rules.modes import DEVICE_GROUPS, STALENESS
from rljob_api.rules.observed import OBSERVED_CHECKS
from rljob_api.rules.pictures import PICTURES
from rljob_api.rules.pod_shapes import SHAPE_CHECKS
from rljob_api.rules.pod_templates import POD_CHECKS
from rljob_api.rules.pods import CLUSTER_CHECKS
from rljob_api.rules.rewards import REWARD_CHECKS
from rljob_api.rules.rollout import ARGUMENT_CHECKS, ENGINE_ARGS
from rljob_api.rules.sandbox import SANDBOX_CHECKS
from rljob_api.rules.silent import SILENT_CHECKS
from rljob_api.rules.sources import SOURCE_CHECKS
from rljob_api.rules.variables import VARIABLE_CHECKS, VARIABLES
from rljob_api.spec import DeviceGroupSpec, ResourcesSpec, RLJobSpec

__all__ = [
    "CHANGES",
    "MUTABLE_FIELDS",
    "RESUMABLE_FIELDS",
    "RULES",
    "Finding",
    "Rule",
    "checks_on",
    "immutable_changes",
    "rules_on",
    "transition_rules",
]

RULES: tuple[Rule, ...] = (
    *DEVICE_GROUPS,
    *BACKENDS,
    *CRITIC,
    *PICTURES,
    *DISTILL,
    *PARALLELISM,
    *MODEL_AND_DATA,
    *EPISODES,
    *JUDGES,
    *STALENESS,
    *LEARNING,
    *ENGINE_ARGS,
    *DEVICES,
    *NETWORK,
    *VARIABLES,
    *CLUSTER,
)

_IDLE = "oldSelf.?status.?phase.orValue('Pending') in ['Pending', 'Suspended']"
_FRESH = f"({_IDLE} && size(oldSelf.?status.?attempts.orValue([])) == 0)"
_PATH = "(has({0}.spec.checkpoint) && has({0}.spec.checkpoint.path) ? {0}.spec.checkpoint.path : '')"
_SAME_PATH = f"{_PATH.format('self')} == {_PATH.format('oldSelf')}"
_STATUS_WRITE = "(has(self.status) && self.?status.?writes != oldSelf.?status.?writes)"
_ANY_TIME = f"at any time: {', '.join(MUTABLE_FIELDS)}"


@functools.cache
def rules_on(block: type[ApiModel]) -> tuple[Rule, ...]:
    """Return the rules between the fields of one block."""
    return tuple(rule for rule in RULES if rule.on is block)


@functools.cache
def checks_on(block: type[ApiModel]) -> tuple[Check, ...]:
    """Return the checks of one block that the API server cannot make."""
    return tuple(
        check
        for table in (
            *(REWARD_CHECKS, SOURCE_CHECKS, ENVIRONMENT_CHECKS, VARIABLE_CHECKS, OBJECT_CHECKS, ARGUMENT_CHECKS),
            *(LENGTH_CHECKS, LIST_CHECKS, OBSERVED_CHECKS, SANDBOX_CHECKS, JUDGE_CHECKS, MODEL_CHECKS),
            *(POD_CHECKS, CLUSTER_CHECKS, DEVICE_CHECKS, DEADLINE_CHECKS, EPISODE_CHECKS, SILENT_CHECKS),
            *(FOLDER_CHECKS, SHAPE_CHECKS, HANDOVER_CHECKS, DISTILL_CHECKS, ADDRESS_CHECKS),
        )
        for check in table.get(block, ())
    )


def transition_rules() -> list[tuple[str, str, str]]:
    """Return (CEL, message, CEL of a message that names the changed fields); `self` and `oldSelf` are whole objects.

    The status says what the job has: without devices (`Pending`, `Suspended`) more may change than with them, and
    before its first attempt everything may. The operator stores the phase before it asks for devices.

    The API server evaluates them at every write of the status too, where the spec cannot change; to compare the blocks
    took a third of such a write. So there are only two, and each first looks whether it is one.
    """
    fixed, resumable = {"spec.checkpoint.path": _SAME_PATH}, dict[str, str]()
    for name, field in fields_of(RLJobSpec).items():
        path = f"spec.{name}"
        nested = [known for known in RESUMABLE_FIELDS if known.startswith(f"{name}.")]
        if name in RESUMABLE_FIELDS:
            resumable[path] = _unchanged(path, field)
        elif name not in MUTABLE_FIELDS:
            fixed[path] = _unchanged_but(path, field, nested) if nested else _unchanged(path, field)
            for known in nested:
                assert field.block is not None
                child = known.removeprefix(f"{name}.")
                resumable[f"spec.{known}"] = _same_below(path, child, fields_of(field.block)[child])
    return [
        _transition_rule(fixed, _FRESH, "cannot change after the job has begun: create another job"),
        _transition_rule(resumable, _IDLE, "cannot change while the job holds devices: set suspend to true first"),
    ]


def _transition_rule(same: dict[str, str], limit: str, wrong: str) -> tuple[str, str, str]:
    changed = _sum([f"({unchanged} ? '' : '{path} ')" for path, unchanged in same.items()])
    text = f"{wrong}; allowed {_ANY_TIME}"
    cel = f"{_STATUS_WRITE} || {limit} || ({' && '.join(same.values())})"
    return cel, f"a field {text}", f"{changed} + '{text}'"


def _sum(terms: Sequence[str]) -> str:
    """The terms added up in pairs of pairs: parsers bound the depth of an expression."""
    if len(terms) == 1:
        return terms[0]
    middle = len(terms) // 2
    return f"({_sum(terms[:middle])} + {_sum(terms[middle:])})"


def _unchanged(path: str, field: BlockField) -> str:
    same = f"self.{path} == oldSelf.{path}"
    # A field that is required or has a default is always there; a block has none (see schema.py).
    if field.info.is_required() or (field.block is None and _default(field) is not None):
        return same
    return f"(has(self.{path}) == has(oldSelf.{path}) && (!has(self.{path}) || {same}))"


def _unchanged_but(path: str, field: BlockField, changeable: Sequence[str]) -> str:
    """The fields of a block other than those that may change on their own."""
    assert field.block is not None
    own = {known.rpartition(".")[2] for known in changeable}
    return "({})".format(
        " && ".join(
            f"({_same_below(path, name, child)} || {_ONLY_ENGINE_NODES})"
            if f"{path}.{name}" == _ENGINES
            else _same_below(path, name, child)
            for name, child in fields_of(field.block).items()
            if name not in own
        )
    )


def _same_below(path: str, name: str, field: BlockField) -> str:
    """A field of a block that either object may lack: a block that is left out has the defaults of its fields.

    The API server bounds an expression's cost by the sizes in the schema, and has none of an optional value: those
    of numbers alone are compared as such.
    """
    below = f"{path}.{name}"
    default = None if field.block is not None and not field.many else _default(field)
    parent, _, block = path.rpartition(".")
    maybe = f"{parent}.?{block}.?{name}"
    if isinstance(default, int | float):
        return f"self.{maybe}.orValue({_literal(default)}) == oldSelf.{maybe}.orValue({_literal(default)})"
    if default is not None and not isinstance(default, list | dict):
        mine, its = (f"(has({one}.{path}) ? {one}.{below} : {_literal(default)})" for one in ("self", "oldSelf"))
        return f"{mine} == {its}"
    there = f"size({maybe}.orValue([])) > 0" if isinstance(default, list) else f"{maybe}.hasValue()"
    mine, its = (there.replace(maybe, f"{one}.{maybe}") for one in ("self", "oldSelf"))
    return f"({mine} ? {its} && self.{below} == oldSelf.{below} : !({its}))"


def _default(field: BlockField) -> Any:
    return None if field.info.is_required() else field.info.get_default(call_default_factory=True)


def _literal(value: Any) -> str:
    """A default as CEL has it."""
    return json.dumps(value.value if isinstance(value, Enum) else value)


def _same_but(path: str, block: type[ApiModel], without: str) -> list[str]:
    return [_unchanged(f"{path}.{name}", field) for name, field in fields_of(block).items() if name != without]


def immutable_changes(old: RLJobSpec, new: RLJobSpec) -> list[str]:
    """Return the camelCase names of the fields that differ and may not, once the job has run."""
    before, after = (without_changeable(spec.model_dump(mode="json", by_alias=True)) for spec in (old, new))
    changed = [name for name in before if before[name] != after[name]]
    if "resources" in changed and _only_engine_nodes(old.resources, new.resources):
        changed.remove("resources")
    return changed + (["checkpoint.path"] if old.checkpoint.path != new.checkpoint.path else [])


def _only_engine_nodes(old: ResourcesSpec, new: ResourcesSpec) -> bool:
    if old.rollout is None or new.rollout is None or new.rollout.max_nodes is None:
        return False
    rollout = old.rollout.model_copy(update={"nodes": new.rollout.nodes})
    before, after = (
        without_changeable({"resources": one.model_dump(mode="json", by_alias=True)})
        for one in (old.model_copy(update={"rollout": rollout}), new)
    )
    return before == after


_ENGINES = "spec.resources.rollout"
_ONLY_ENGINE_NODES = "({})".format(
    " && ".join(
        [
            "has(self.spec.resources) && has(oldSelf.spec.resources)",
            f"has(self.{_ENGINES}) && has(oldSelf.{_ENGINES}) && has(self.{_ENGINES}.maxNodes)",
            *_same_but(_ENGINES, DeviceGroupSpec, "nodes"),
        ]
    )
)
"""The number of nodes with engines, which the job's bounds allow to change in `resources.rollout`."""
