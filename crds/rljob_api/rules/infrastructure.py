"""Rules about what is built, parallel sizes and cluster settings."""

from __future__ import annotations

import re
from typing import Any

from rljob_api import derived
from rljob_api.job import RLJob
from rljob_api.ray_ports import WORKER_PORTS, worker_ports
from rljob_api.rules.core import Rule, exactly_one
from rljob_api.spec import (
    FailurePolicy,
    HcclPorts,
    HcclSpec,
    PortRange,
    QueueSystem,
    RLJobSpec,
    SchedulingSpec,
    StorageSpec,
    Toleration,
    VolumeSpec,
)


def _batch_fits_data_parallel(spec: Any) -> bool:
    replicas = derived.data_parallel(spec)
    batch = spec.training.global_batch_size or derived.samples_per_step(spec)
    return batch % replicas == 0


def _devices_fit_model(spec: Any) -> bool:
    return derived.trainers(spec) % (spec.training.tensor_parallel * spec.training.pipeline_parallel) == 0


def _devices_fit_context(spec: Any) -> bool:
    training = spec.training
    model = training.tensor_parallel * training.pipeline_parallel
    return not _devices_fit_model(spec) or derived.trainers(spec) // model % training.context_parallel == 0


def _let(cel: str, **values: str) -> str:
    """Give values names in a condition: for each `self.block.field` the API server walks all fields of the spec, and a
    rule with ten of them took it a millisecond at every write."""
    for name, value in reversed(values.items()):
        cel = f"[{value}].all({name}, {cel})"
    return cel


def _own(group: str) -> tuple[str, str]:
    """CEL for absent devices of trainers or engines, and for their number on a node."""
    of_group = f"self.resources.{group}"
    absent = (
        f"self.mode != 'Colocated' ? !has({of_group}) || !has({of_group}.devicesPerNode)"
        " : !has(self.resources.devicesPerNode)"
    )
    count = f"self.mode != 'Colocated' ? {of_group}.devicesPerNode : self.resources.devicesPerNode"
    return f"!has(self.resources) || ({absent})", count


_TRAINER_NODES = (
    "self.mode != 'Colocated' && has(self.resources.trainer) && has(self.resources.trainer.nodes)"
    " ? self.resources.trainer.nodes : self.resources.nodes"
)


_NOT_GIVEN, _PER_NODE = _own("trainer")


def trainer_devices() -> tuple[str, str]:
    """CEL: where the trainers' devices are not given, and how many there are in all."""
    return _NOT_GIVEN, _DEVICES


_NO_ENGINES_GIVEN, _ENGINES_PER_NODE = _own("rollout")
_DEVICES = f"({_TRAINER_NODES}) * ({_PER_NODE})"
_MODEL_SIZE = "has(self.training) ? self.training.tensorParallel * self.training.pipelineParallel : 1"
_REPLICA_SIZE = (
    "has(self.training) ? self.training.tensorParallel * self.training.pipelineParallel * self.training.contextParallel"
    " : 1"
)
_SAMPLES = "self.rollout.promptsPerStep * self.rollout.samplesPerPrompt"
_BATCH_GIVEN = "has(self.training) && has(self.training.globalBatchSize)"

# Without devicesPerNode CEL lets these pass: the least common multiple that it defaults to is out of CEL's reach.
PARALLELISM = (
    Rule(
        on=RLJobSpec,
        field="training.tensorParallel",
        wrong="the job's devices cannot be divided into model replicas",
        allowed="training.tensorParallel x training.pipelineParallel divides nodes x devicesPerNode of resources"
        " (with mode Disaggregated or Async: of resources.trainer)",
        check=_devices_fit_model,
        cel=f"{_NOT_GIVEN} || ({_DEVICES}) % ({_MODEL_SIZE}) == 0",
    ),
    Rule(
        on=RLJobSpec,
        field="training.contextParallel",
        wrong="the job's model replicas cannot be divided into groups that share rows",
        allowed="training.contextParallel divides devices / (training.tensorParallel x training.pipelineParallel)",
        check=_devices_fit_context,
        cel=f"{_NOT_GIVEN} || !has(self.training) || self.training.contextParallel == 1 || "
        + _let(
            "devices % model_size != 0 || devices / model_size % self.training.contextParallel == 0",
            devices=_DEVICES,
            model_size=_MODEL_SIZE,
        ),
    ),
    Rule(
        on=RLJobSpec,
        field="rollout.tensorParallel",
        wrong="a node's devices cannot be divided into engines",
        allowed="rollout.tensorParallel divides resources.devicesPerNode (with mode Disaggregated or"
        " Async: resources.rollout.devicesPerNode)",
        check=lambda s: derived.engine_devices_per_node(s) % s.rollout.tensor_parallel == 0,
        cel=f"{_NO_ENGINES_GIVEN} || ({_ENGINES_PER_NODE}) % self.rollout.tensorParallel == 0",
    ),
    Rule(
        on=RLJobSpec,
        field="training.globalBatchSize",
        wrong="the step's samples cannot be divided into optimizer updates",
        allowed="training.globalBatchSize divides rollout.promptsPerStep x rollout.samplesPerPrompt",
        check=lambda s: (
            s.training.global_batch_size is None or derived.samples_per_step(s) % s.training.global_batch_size == 0
        ),
        cel=f"!({_BATCH_GIVEN}) || {_SAMPLES} % self.training.globalBatchSize == 0",
    ),
    Rule(
        on=RLJobSpec,
        field="training.globalBatchSize",
        wrong="an update's samples cannot be divided among the model replicas",
        allowed="a multiple of the data parallel size: devices / (tensorParallel x pipelineParallel x"
        " contextParallel) of training"
        " (without globalBatchSize: rollout.promptsPerStep x rollout.samplesPerPrompt is such a multiple)",
        check=lambda s: not _devices_fit_model(s) or not _devices_fit_context(s) or _batch_fits_data_parallel(s),
        cel=f"{_NOT_GIVEN} || "
        + _let(
            "devices % replica_size != 0 || batch % (devices / replica_size) == 0",
            devices=_DEVICES,
            replica_size=_REPLICA_SIZE,
            batch=f"{_BATCH_GIVEN} ? self.training.globalBatchSize : {_SAMPLES}",
        ),
    ),
    Rule(
        on=RLJobSpec,
        field="training.expertParallel",
        wrong="the devices of a pipeline stage cannot be divided into expert-parallel groups",
        allowed="training.expertParallel divides devices / training.pipelineParallel",
        check=lambda s: (
            not _devices_fit_model(s)
            or derived.trainers(s) // s.training.pipeline_parallel % s.training.expert_parallel == 0
        ),
        cel=f"{_NOT_GIVEN} || !has(self.training) || "
        + _let(
            "devices % (training.tensorParallel * training.pipelineParallel) != 0"
            " || devices / training.pipelineParallel % training.expertParallel == 0",
            devices=_DEVICES,
            training="self.training",
        ),
    ),
)


def _disjoint(a: Any, b: Any) -> bool:
    return a is None or b is None or a.last < b.first or b.last < a.first


def _ports_rule(kind: str) -> Rule:
    trainer, rollout = f"self.trainerPorts.{kind}", f"self.rolloutPorts.{kind}"
    return Rule(
        on=HcclSpec,
        field=f"rolloutPorts.{kind}",
        wrong="meets the trainers' ports on the same device",
        allowed=f"a range apart from trainerPorts.{kind}",
        check=lambda h: _disjoint(getattr(h.trainer_ports, kind), getattr(h.rollout_ports, kind)),
        cel=f"!has(self.trainerPorts) || !has(self.rolloutPorts) || !has({trainer}) || !has({rollout})"
        f" || {trainer}.last < {rollout}.first || {rollout}.last < {trainer}.first",
    )


def _engine_nodes_ports_rule(role: str, attribute: str) -> Rule:
    """In the node's network, nodes with engines have a range of Ray's ports of their own."""
    first, last = worker_ports(1)
    ports = f"self.hccl.{role}"
    apart = "has(self.resources) && has(self.resources.trainer) && has(self.resources.trainer.nodes)"
    shared = "has(self.network) && has(self.network.hostNetwork) && self.network.hostNetwork"
    given = f"has(self.hccl) && has({ports}) && has({ports}.host)"

    def check(spec: Any) -> bool:
        host = getattr(spec.hccl, attribute).host
        if host is None or not spec.network.host_network or not derived.has_nodes_apart(spec):
            return True
        return bool(host.last < first or host.first > last)

    return Rule(
        on=RLJobSpec,
        field=f"hccl.{role}.host",
        wrong=f"meets the ports of Ray's processes on nodes with engines, {first} to {last}",
        allowed="others, or none: the system then picks free ports",
        check=check,
        cel=f"!({apart}) || !({shared}) || !({given}) || {ports}.host.last < {first} || {ports}.host.first > {last}",
    )


def _system_ports_rule(kind: str) -> Rule:
    return Rule(
        on=HcclPorts,
        field=f"{kind}.first",
        wrong="ports up to 1023 belong to the system",
        allowed="at least 1024",
        check=lambda p: getattr(p, kind) is None or getattr(p, kind).first > 1023,
        cel=f"!has(self.{kind}) || self.{kind}.first > 1023",
    )


_NAME = "[a-z]([-a-z0-9]*[a-z0-9])?"
NETWORK = (
    Rule(
        on=PortRange,
        field="last",
        wrong="is below the first port",
        allowed="at least first",
        check=lambda p: p.first <= p.last,
        cel="self.first <= self.last",
    ),
    _system_ports_rule("host"),
    _system_ports_rule("device"),
    Rule(
        on=HcclPorts,
        field="host",
        wrong="meets the ports of Ray's processes, {} to {}".format(*WORKER_PORTS),
        allowed="others, or none: the system then picks free ports",
        check=lambda p: p.host is None or p.host.first > WORKER_PORTS[1] or p.host.last < WORKER_PORTS[0],
        cel="!has(self.host) || self.host.first > {1} || self.host.last < {0}".format(*WORKER_PORTS),
    ),
    _engine_nodes_ports_rule("trainerPorts", "trainer_ports"),
    _engine_nodes_ports_rule("rolloutPorts", "rollout_ports"),
    _ports_rule("host"),
    _ports_rule("device"),
    Rule(
        on=RLJobSpec,
        field="hccl.useHostIp",
        wrong="a pod without the node's network cannot bind the node's address",
        allowed="true only with network.hostNetwork true",
        check=lambda s: s.hccl.use_host_ip is not True or s.network.host_network,
        cel="!has(self.hccl) || !has(self.hccl.useHostIp) || !self.hccl.useHostIp"
        " || (has(self.network) && self.network.hostNetwork)",
    ),
    Rule(
        on=HcclSpec,
        field="useHostIp",
        wrong="HCCL_IF_IP would override interface",
        allowed="true, or interface, not both",
        check=lambda h: h.use_host_ip is not True or h.interface is None,
        cel="!has(self.useHostIp) || !self.useHostIp || !has(self.interface)",
    ),
    Rule(
        on=HcclSpec,
        field="opExpansionMode",
        wrong="AIV and deterministic exclude each other: with HCCL_DETERMINISTIC, HCCL ignores AIV on A2 and is"
        " deterministic for small messages alone on A3",
        allowed="another mode, or AIV with deterministic false",
        check=lambda h: h.op_expansion_mode != "AIV" or not h.deterministic,
        cel="!has(self.opExpansionMode) || self.opExpansionMode != 'AIV' || !self.deterministic",
    ),
)


def _volumes_rule(field: str, attribute: str) -> Rule:
    return Rule(
        on=StorageSpec,
        field="volumes",
        wrong=f"two volumes have the same {field}",
        allowed=f"a different {field} for each volume",
        check=lambda s: len({getattr(volume, attribute) for volume in s.volumes}) == len(s.volumes),
        cel=f"self.volumes.all(v, self.volumes.exists_one(w, w.{field} == v.{field}))",
    )


CLUSTER = (
    Rule(
        on=RLJob,
        field="metadata.name",
        wrong="is no name for a Ray cluster and its services",
        allowed="at most 47 lower-case letters, digits and hyphens; a letter first, no hyphen last",
        check=lambda j: len(j.metadata.name) <= 47 and bool(re.fullmatch(_NAME, j.metadata.name)),
        cel=f"size(self.metadata.name) <= 47 && self.metadata.name.matches('^{_NAME}$')",
    ),
    Rule(
        on=SchedulingSpec,
        field="queue",
        wrong="there is no queueing system to read it",
        allowed="only with scheduling.system Kueue, Volcano or MindCluster",
        check=lambda s: s.queue is None or s.system != QueueSystem.NONE,
        cel="!has(self.queue) || self.system != 'None'",
    ),
    Rule(
        on=SchedulingSpec,
        field="superPodBlock",
        wrong="only MindCluster places by SuperPoD",
        allowed="only with scheduling.system MindCluster",
        check=lambda s: s.super_pod_block is None or s.system == QueueSystem.MIND_CLUSTER,
        cel="!has(self.superPodBlock) || self.system == 'MindCluster'",
    ),
    Rule(
        on=Toleration,
        field="",
        wrong="its operator does not go with its key and value",
        allowed="operator Equal with a key, or operator Exists without a value",
        check=lambda t: t.key is not None if t.operator == "Equal" else t.value is None,
        cel="!has(self.operator) || self.operator == 'Equal' ? has(self.key) : !has(self.value)",
    ),
    Rule(
        on=Toleration,
        field="tolerationSeconds",
        wrong="only NoExecute evicts",
        allowed="only with effect NoExecute",
        check=lambda t: t.toleration_seconds is None or t.effect == "NoExecute",
        cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
    ),
    Rule(
        on=FailurePolicy,
        field="maxBackoffSeconds",
        wrong="is below the first wait",
        allowed="at least backoffSeconds",
        check=lambda p: p.max_backoff_seconds >= p.backoff_seconds,
        cel="self.maxBackoffSeconds >= self.backoffSeconds",
    ),
    exactly_one(VolumeSpec, "claim", "hostPath", "source"),
    _volumes_rule("name", "name"),
    _volumes_rule("mountPath", "mount_path"),
)
