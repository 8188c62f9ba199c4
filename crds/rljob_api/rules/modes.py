"""Rules about modes: which devices each has, and how old the tokens may be that it trains on."""

from __future__ import annotations

from typing import Any

from rljob_api import derived
from rljob_api.rules.core import Rule
from rljob_api.spec import DeviceGroupSpec, Mode, QueueSystem, RLJobSpec, RolloutSpec, TisSpec, WeightTransport
from rljob_api.spec.algorithm import RatioAnchor, TisLevel, TisOutside
from rljob_api.spec.rollout import RolloutAssignment, StalenessLimit, StalenessOrder

_CPU = "cpu"
_SHARED = f"self.mode == '{Mode.COLOCATED}'"
_SHARED_TRANSPORTS = (WeightTransport.AUTO, WeightTransport.IN_PLACE)
_NOT_LOCKSTEP = f"self.mode != '{Mode.DISAGGREGATED}'"
_NOT_ASYNC = f"self.mode != '{Mode.ASYNC}'"
_NO_RESOURCES = "!has(self.resources)"
_ANCHORED = (
    f"(has(self.algorithm) && has(self.algorithm.anchor) ? self.algorithm.anchor == '{RatioAnchor.ROLLOUT}'"
    f" : self.mode == '{Mode.ASYNC}' && has(self.rollout.staleness) && self.rollout.staleness.max >= 2)"
)
_FIXED = f"{_NO_RESOURCES} || !has(self.resources.rollout) || !has(self.resources.rollout.maxNodes)"
_STALENESS_0 = "(has(self.rollout.staleness) && self.rollout.staleness.max == 0)"


def _divided(spec: Any) -> bool:
    return derived.divides_devices(spec)


def _is_ahead(spec: Any) -> bool:
    return _divided(spec) and derived.max_staleness(spec) > 0


def _anchored(spec: Any) -> bool:
    return derived.ratio_anchor(spec) == RatioAnchor.ROLLOUT


def _is_default(tis: Any) -> bool:
    # A view of what was given is not of the model's type.
    default = TisSpec()
    return all(getattr(tis, name) == getattr(default, name) for name in TisSpec.model_fields)


def _has_nodes(group: Any) -> bool:
    return group is not None and group.nodes is not None


def _elastic(spec: Any) -> bool:
    return derived.is_elastic(spec)


def _group_rule(group: str) -> Rule:
    return Rule(
        on=RLJobSpec,
        field=f"resources.{group}",
        wrong="the devices of this mode are not divided into groups",
        allowed="only with mode Disaggregated or Async",
        check=lambda s: _divided(s) or getattr(s.resources, group) is None,
        cel=f"!({_SHARED}) || {_NO_RESOURCES} || !has(self.resources.{group})",
    )


def _not_with_groups(block: str) -> Rule:
    return Rule(
        on=RLJobSpec,
        field=f"rollout.{block}",
        wrong="is not built yet with devices of their own for trainers and engines",
        allowed="leave it out, or mode Colocated",
        check=lambda s: not _divided(s) or getattr(s.rollout, block) is None,
        cel=f"{_SHARED} || !has(self.rollout.{block})",
    )


DEVICE_GROUPS = (
    _group_rule("trainer"),
    _group_rule("rollout"),
    Rule(
        on=RLJobSpec,
        field="resources.devicesPerNode",
        wrong="trainers and engines have devices of their own",
        allowed="resources.trainer.devicesPerNode and resources.rollout.devicesPerNode in modes other than Colocated",
        check=lambda s: not _divided(s) or s.resources.devices_per_node is None,
        cel=f"{_SHARED} || {_NO_RESOURCES} || !has(self.resources.devicesPerNode)",
    ),
    Rule(
        on=RLJobSpec,
        field="resources.nodes",
        wrong="trainers and engines have devices of their own",
        allowed="1, or left out, with mode Disaggregated or Async; resources.trainer.nodes and resources.rollout.nodes"
        " give them nodes of their own",
        check=lambda s: not _divided(s) or s.resources.nodes == 1,
        cel=f"{_SHARED} || {_NO_RESOURCES} || self.resources.nodes == 1",
    ),
    Rule(
        on=RLJobSpec,
        field="resources.rollout.nodes",
        wrong="either both groups have nodes of their own or neither",
        allowed="given with resources.trainer.nodes, or left out with it: trainers and engines on one machine",
        check=lambda s: _has_nodes(s.resources.trainer) == _has_nodes(s.resources.rollout),
        cel=f"{_NO_RESOURCES} || (has(self.resources.trainer) && has(self.resources.trainer.nodes))"
        " == (has(self.resources.rollout) && has(self.resources.rollout.nodes))",
    ),
    Rule(
        on=DeviceGroupSpec,
        field="worker",
        wrong="the group has no pods of its own",
        allowed="only with nodes, of both groups; else trainers and engines are in the pods of resources.worker",
        check=lambda g: g.worker is None or g.nodes is not None,
        cel="!has(self.worker) || has(self.nodes)",
    ),
    Rule(
        on=RLJobSpec,
        field="weightSync.transport",
        wrong="trainers and engines share devices, and need nothing between them",
        allowed="Auto or InPlace; others only with mode Disaggregated or Async",
        check=lambda s: _divided(s) or s.weight_sync.transport in _SHARED_TRANSPORTS,
        cel=f"!({_SHARED}) || !has(self.weightSync) || self.weightSync.transport in"
        f" {[transport.value for transport in _SHARED_TRANSPORTS]}",
    ),
    Rule(
        on=DeviceGroupSpec,
        field="minNodes",
        wrong="there is no number of nodes that could change",
        allowed="only with maxNodes",
        check=lambda g: g.min_nodes is None or g.max_nodes is not None,
        cel="!has(self.minNodes) || has(self.maxNodes)",
    ),
    Rule(
        on=DeviceGroupSpec,
        field="nodes",
        wrong="is missing, or outside of its own bounds",
        allowed="minNodes (default 1) to maxNodes, where maxNodes is given",
        check=lambda g: g.max_nodes is None or (g.nodes is not None and (g.min_nodes or 1) <= g.nodes <= g.max_nodes),
        cel="!has(self.maxNodes) || (has(self.nodes) && self.nodes <= self.maxNodes"
        " && self.nodes >= (has(self.minNodes) ? self.minNodes : 1))",
    ),
    Rule(
        on=RLJobSpec,
        field="resources.trainer.maxNodes",
        wrong="trainers are one process group, and stay as many as they are",
        allowed="leave it out; resources.rollout.maxNodes",
        check=lambda s: s.resources.trainer is None or s.resources.trainer.max_nodes is None,
        cel=f"{_NO_RESOURCES} || !has(self.resources.trainer) || !has(self.resources.trainer.maxNodes)",
    ),
    Rule(
        on=RLJobSpec,
        field="resources.rollout.maxNodes",
        wrong="only engines that generate all the time can come and go",
        allowed="leave it out, or mode Async",
        check=lambda s: s.mode == Mode.ASYNC or not _elastic(s),
        cel=f"!({_NOT_ASYNC}) || {_FIXED}",
    ),
    Rule(
        on=RLJobSpec,
        field="resources.rollout.maxNodes",
        wrong="an engine of several accelerators is told those of other processes, and cannot come later",
        allowed="leave it out, rollout.tensorParallel 1, or profile cpu",
        check=lambda s: s.resources.profile == _CPU or s.rollout.tensor_parallel == 1 or not _elastic(s),
        cel=f"{_FIXED} || self.resources.profile == '{_CPU}' || self.rollout.tensorParallel == 1",
    ),
    Rule(
        on=RLJobSpec,
        field="resources.rollout.maxNodes",
        wrong="the queue admitted the job with the pods that it had then",
        allowed="leave it out, or scheduling.system None",
        check=lambda s: s.scheduling.system == QueueSystem.NONE or not _elastic(s),
        cel=f"{_FIXED} || !has(self.scheduling) || self.scheduling.system == '{QueueSystem.NONE}'",
    ),
    _not_with_groups("partial"),
    _not_with_groups("oversampling"),
    _not_with_groups("tail"),
)

STALENESS = (
    Rule(
        on=RLJobSpec,
        field="rollout.staleness",
        wrong="every token is of the step's own weights",
        allowed="only with rollout.partial, or mode Disaggregated or Async",
        check=lambda s: s.rollout.staleness is None or s.rollout.partial is not None or _divided(s),
        cel=f"!has(self.rollout.staleness) || has(self.rollout.partial) || !({_SHARED})",
    ),
    Rule(
        on=RolloutSpec,
        field="staleness.max",
        wrong="what partial rollout carries into the next step is an update older there",
        allowed="1 to 15 with partial",
        check=lambda r: r.partial is None or r.staleness is None or r.staleness.max > 0,
        cel="!has(self.partial) || !has(self.staleness) || self.staleness.max > 0",
    ),
    Rule(
        on=RLJobSpec,
        field="rollout.staleness.max",
        wrong="the engines are one step ahead at most",
        allowed="0 or 1 with mode Disaggregated; more with mode Async",
        check=lambda s: s.mode != Mode.DISAGGREGATED or derived.max_staleness(s) <= 1,
        cel=f"{_NOT_LOCKSTEP} || !has(self.rollout.staleness) || self.rollout.staleness.max <= 1",
    ),
    Rule(
        on=RLJobSpec,
        field="algorithm.tis.enabled",
        wrong="tokens of the weights before would be taken for those of the weights that are trained",
        allowed="true, as by default, with mode Disaggregated or Async; or rollout.staleness.max 0",
        check=lambda s: not _is_ahead(s) or _anchored(s) or s.algorithm.tis.enabled,
        cel=f"{_SHARED} || {_STALENESS_0} || {_ANCHORED} || !has(self.algorithm) || !has(self.algorithm.tis)"
        " || self.algorithm.tis.enabled",
    ),
    Rule(
        on=RLJobSpec,
        field="algorithm.tis.level",
        wrong="a response's tokens may be of several weights, and each has a ratio of its own",
        allowed="Token, as by default, with mode Async; or rollout.staleness.max 0",
        check=lambda s: (
            s.mode != Mode.ASYNC or not _is_ahead(s) or _anchored(s) or s.algorithm.tis.level == TisLevel.TOKEN
        ),
        cel=f"{_NOT_ASYNC} || {_STALENESS_0} || {_ANCHORED} || !has(self.algorithm) || !has(self.algorithm.tis)"
        f" || self.algorithm.tis.level == '{TisLevel.TOKEN}'",
    ),
    Rule(
        on=RLJobSpec,
        field="algorithm.tis",
        wrong="has no effect where the ratio of the loss starts from the engine's log-probabilities",
        allowed="leave it out, or algorithm.anchor Trainer (Rollout is the default in mode Async with "
        "rollout.staleness.max from 2)",
        check=lambda s: not _anchored(s) or _is_default(s.algorithm.tis),
        cel=f"!{_ANCHORED} || !has(self.algorithm) || !has(self.algorithm.tis) || (self.algorithm.tis.enabled"
        f" && self.algorithm.tis.level == '{TisLevel.TOKEN}' && self.algorithm.tis.outside == '{TisOutside.TRUNCATE}'"
        " && double(self.algorithm.tis.low) == 0.0 && double(self.algorithm.tis.high) == 2.0)",
    ),
    Rule(
        on=RLJobSpec,
        field="rollout.staleness.order",
        wrong="a step trains on the batch that was generated for it",
        allowed="InOrder, as by default; ReadyFirst with mode Async",
        check=lambda s: (
            s.mode == Mode.ASYNC or s.rollout.staleness is None or s.rollout.staleness.order == StalenessOrder.IN_ORDER
        ),
        cel=f"!({_NOT_ASYNC}) || !has(self.rollout.staleness)"
        f" || self.rollout.staleness.order == '{StalenessOrder.IN_ORDER}'",
    ),
    Rule(
        on=RolloutSpec,
        field="staleness.onLimit",
        wrong="a step trains on the groups of the data's next prompts, and waits for them",
        allowed="Wait, as by default; Mask or Discard with order ReadyFirst",
        check=lambda r: (
            r.staleness is None
            or r.staleness.on_limit == StalenessLimit.WAIT
            or r.staleness.order == StalenessOrder.READY_FIRST
        ),
        cel=f"!has(self.staleness) || self.staleness.onLimit == '{StalenessLimit.WAIT}'"
        f" || self.staleness.order == '{StalenessOrder.READY_FIRST}'",
    ),
    Rule(
        on=RLJobSpec,
        field="rollout.staleness.inFlight",
        wrong="this mode begins the groups of whole steps",
        allowed="only with mode Async",
        check=lambda s: s.mode == Mode.ASYNC or s.rollout.staleness is None or s.rollout.staleness.in_flight is None,
        cel=f"!({_NOT_ASYNC}) || !has(self.rollout.staleness) || !has(self.rollout.staleness.inFlight)",
    ),
    Rule(
        on=RolloutSpec,
        field="staleness.inFlight",
        wrong="a step could never have its groups, or the bound allows no more anyway",
        allowed="promptsPerStep to (staleness.max + 1) * promptsPerStep",
        check=lambda r: (
            r.staleness is None
            or r.staleness.in_flight is None
            or r.prompts_per_step <= r.staleness.in_flight <= (r.staleness.max + 1) * r.prompts_per_step
        ),
        cel="!has(self.staleness) || !has(self.staleness.inFlight) || (self.staleness.inFlight >= self.promptsPerStep"
        " && self.staleness.inFlight <= (self.staleness.max + 1) * self.promptsPerStep)",
    ),
    Rule(
        on=RLJobSpec,
        field="rollout.assignment",
        wrong="engines are given all that is open anew at each update of the weights",
        allowed="Fixed, as by default, with mode Async",
        check=lambda s: s.mode != Mode.ASYNC or s.rollout.assignment == RolloutAssignment.FIXED,
        cel=f"{_NOT_ASYNC} || self.rollout.assignment == '{RolloutAssignment.FIXED}'",
    ),
)
