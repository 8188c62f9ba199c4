"""Megatron's parallel state, and which ranks wait for one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from rljob_api.spec import TrainingSpec
from rljob_worker.parallel_layout import ParallelLayout, check_sizes
from rljob_worker.trainer.context_parallel import context_group
from rljob_worker.trainer.process_groups import ProcessGroups

GROUP_HOLDERS = ("megatron", "mindspeed")
"""Packages that keep process groups."""


def initialize(
    training: TrainingSpec, *, rank: int, world_size: int, store: str, backend: str, timeout_seconds: float
) -> tuple[ParallelLayout, ProcessGroups, dist.ProcessGroup | None]:
    """Join the process group at `store` (see `rendezvous`) and set Megatron's parallel state.

    Collectives that wait longer than `timeout_seconds` for a peer raise.

    Returns:
        This rank's layout, all its groups, and the group that divides its rows, None where there is none.
    """
    from megatron.core import parallel_state

    check_sizes(training, world_size)
    groups = ProcessGroups(
        store,
        rank=rank,
        world_size=world_size,
        backend=backend,
        timeout_seconds=timeout_seconds,
        holders=GROUP_HOLDERS,
    )
    with groups.recording():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=training.tensor_parallel,
            pipeline_model_parallel_size=training.pipeline_parallel,
            expert_model_parallel_size=training.expert_parallel,
            expert_tensor_parallel_size=1 if training.expert_parallel > 1 else None,
            distributed_timeout_minutes=max(1, round(timeout_seconds / 60)),
            create_gloo_process_groups=backend != "gloo",
        )
        layout = replace(megatron_layout(), cp=training.context_parallel)
        return layout, groups, context_group(layout)


def megatron_layout() -> ParallelLayout:
    """This process's layout, by Megatron's parallel state.

    Raises:
        RuntimeError: Megatron numbers ranks in another order than `ParallelLayout`.
    """
    from megatron.core import parallel_state

    layout = ParallelLayout(
        world_size=dist.get_world_size(),
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        rank=dist.get_rank(),
    )
    theirs = {
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "ep_rank": parallel_state.get_expert_model_parallel_rank(),
    }
    ours = {name: value for name, value in layout.coordinates().items() if name in theirs}
    if ours != theirs:
        raise RuntimeError(f"Megatron numbers ranks in an unknown order: rank {layout.rank} is {theirs}, not {ours}")
    return layout


def lockstep_leader(context: dist.ProcessGroup | None) -> int:
    """Global rank of the one that decides where this rank's micro-batches stop.

    Ranks that share tensor, pipeline, expert or context parallelism (group `context`) wait for one another inside a
    micro-batch, so all of them must stop at the same one. The leader is the lowest rank among them: on the first
    pipeline stage.
    """
    from megatron.core import parallel_state as ps

    groups: list[Callable[[], dist.ProcessGroup]] = [
        ps.get_tensor_model_parallel_group,
        ps.get_pipeline_model_parallel_group,
        ps.get_expert_model_parallel_group,
        ps.get_expert_tensor_parallel_group,
    ]
    joined = [group() for group in groups] + ([] if context is None else [context])
    peers = sorted(set().union(*map(dist.get_process_group_ranks, joined)))
    everyone: list[list[int]] = [peers for _ in range(dist.get_world_size())]
    if len(everyone) > 1:
        dist.all_gather_object(everyone, peers)
    return min(connected(dist.get_rank(), everyone))


def connected(rank: int, peers: list[list[int]]) -> set[int]:
    """Ranks that `rank` reaches over `peers`: for each rank, those it shares a group with."""
    reached, new = set(), {rank}
    while new:
        reached |= new
        new = set().union(*(peers[member] for member in new)) - reached
    return reached
