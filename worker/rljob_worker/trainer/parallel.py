"""This rank's place in the parallel layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch.distributed as dist

from rljob_api.spec import TrainingSpec
from rljob_worker.devices.gloo import share_gloo_loop
from rljob_worker.trainer.process_groups import ProcessGroups


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank stands; a saved state fits only the rank with the same ones."""

    rank: int
    world_size: int
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    ep: int
    ep_rank: int
    dp: int
    dp_rank: int

    def as_dict(self) -> dict[str, int]:
        """Plain values for a file."""
        return asdict(self)

    @property
    def first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pp_rank == self.pp - 1


def check_sizes(training: TrainingSpec, world_size: int) -> None:
    """Refuse parallel sizes that do not fit the number of devices; ValueError names the field."""
    model = training.tensor_parallel * training.pipeline_parallel
    if world_size % model:
        raise ValueError(
            f"training.tensorParallel x training.pipelineParallel is {training.tensor_parallel} x "
            f"{training.pipeline_parallel} = {model}, which does not divide the {world_size} devices"
        )
    if (world_size // training.pipeline_parallel) % training.expert_parallel:
        raise ValueError(
            f"training.expertParallel: {training.expert_parallel} does not divide the "
            f"{world_size // training.pipeline_parallel} devices of a pipeline stage"
        )


def initialize(
    training: TrainingSpec, *, rank: int, world_size: int, store: str, backend: str, timeout_seconds: float
) -> tuple[Coordinates, ProcessGroups]:
    """Join the process group at `store` (`tcp://host:port`) and set Megatron's parallel state.

    Collectives that wait longer than `timeout_seconds` for a peer raise.
    """
    from megatron.core import parallel_state

    check_sizes(training, world_size)
    share_gloo_loop()
    groups = ProcessGroups(store, rank=rank, world_size=world_size, backend=backend, timeout_seconds=timeout_seconds)
    with groups.recording():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=training.tensor_parallel,
            pipeline_model_parallel_size=training.pipeline_parallel,
            expert_model_parallel_size=training.expert_parallel,
            expert_tensor_parallel_size=1 if training.expert_parallel > 1 else None,
            distributed_timeout_minutes=max(1, round(timeout_seconds / 60)),
            create_gloo_process_groups=backend != "gloo",
        )
    place = Coordinates(
        rank=rank,
        world_size=world_size,
        tp=training.tensor_parallel,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp=training.pipeline_parallel,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        ep=training.expert_parallel,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
    )
    return place, groups


def lockstep_leader() -> int:
    """Global rank of the one that decides where this rank's micro-batches stop.

    Ranks that share tensor, pipeline or expert parallelism wait for one another inside a micro-batch, so all of them
    must stop at the same one. The leader is the lowest rank among them: on the first pipeline stage.
    """
    from megatron.core import parallel_state as ps

    groups: list[Callable[[], dist.ProcessGroup]] = [
        ps.get_tensor_model_parallel_group,
        ps.get_pipeline_model_parallel_group,
        ps.get_expert_model_parallel_group,
        ps.get_expert_tensor_parallel_group,
    ]
    peers = sorted(set().union(*(dist.get_process_group_ranks(group()) for group in groups)))
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
