"""Communicators of a rank and the device memory that they hold, asleep or awake."""

from __future__ import annotations

from rljob_api.spec import RLJobSpec
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.facts import ModelFacts
from rljob_worker.planning.job_shape import JobShape

_DEFAULT_MIB = 200
_BUFFERS = 2
"""HCCL: HCCL_BUFFSIZE (default 200 MB) for sending and as much for receiving, in each communicator (CANN, environment
variable reference; facts of torch_npu: memory is given back only when the group is destroyed)."""


def trainer_groups(model: ModelFacts, job: JobShape) -> list[str]:
    """A backend's process groups of more than one rank that a training step uses on the device.

    Communicators are made at a group's first collective, so groups that are never used cost nothing. Which ones are
    used was seen by recording the collectives of real training steps (tests/worker/planning/test_communicators.py).
    Megatron's names are those of `parallel_state.get_..._group`. FSDP gathers over the ranks that divide a copy, adds
    gradients up over the copies, and the rest over all ranks; around attention those that divide a row exchange it.
    """
    if not isinstance(model, ModelConfig):
        trainers = job.trainers
        sizes = {"shards": trainers.shards, "copies": trainers.world_size // trainers.shards}
        sizes |= {"context": trainers.cp, "world": trainers.world_size}
        return [name for name, size in sizes.items() if size > 1]
    groups = {
        "tensor_model_parallel": job.trainers.tp,
        "pipeline_model_parallel": job.trainers.pp,
        # Ours: to Megatron its ranks are replicas.
        "context_parallel": job.trainers.cp,
        "data_parallel_with_context_parallel": job.trainers.dp,
        # The gradient norm's.
        "intra_distributed_optimizer_instance": job.trainers.world_size,
        # The tied embedding's gradients are added up over the first and the last stage.
        "embedding": job.trainers.pp if model.tied_embeddings else 1,
    }
    if model.num_experts:
        groups |= {
            "expert_model_parallel": job.trainers.ep,
            "expert_tensor_parallel": job.trainers.expert_tp,
            "expert_tensor_and_model_parallel": job.trainers.ep * job.trainers.expert_tp,
            "expert_data_parallel": job.trainers.expert_dp if job.trainers.ep > 1 else 1,
        }
    return [name for name, size in groups.items() if size > 1]


def engine_groups(model: ModelFacts, job: JobShape) -> list[str]:
    """vLLM's process groups of more than one rank: tensor parallel, and the experts' on devices."""
    if job.engine_tp == 1:
        return []
    return ["tensor_parallel", "expert_parallel"] if any(model.moe_layers) else ["tensor_parallel"]


def communicator_bytes(spec: RLJobSpec, job: JobShape, groups: list[str]) -> int:
    """Device memory of the communicators of some groups; none on cpu, whose Gloo has no buffers."""
    if job.kind == "cpu":
        return 0
    return len(groups) * _BUFFERS * (spec.hccl.buffer_size_mb or _DEFAULT_MIB) * 2**20
