"""How the trainers of a job divide the model and the samples among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rljob_api.spec import TrainingSpec


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Parallel sizes, in ranks, and where one of the ranks stands.

    Ranks are numbered as Megatron does by default (`parallel_state.initialize_model_parallel`, order tp-cp-ep-dp-pp):
    tensor parallelism is innermost, then replicas, pipeline stages are outermost. The ranks of a stage hold the experts
    in a cut of their own: where those are dealt out, tensor parallelism does not cut them.
    """

    world_size: int = 1
    tp: int = 1
    """Tensor parallel."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert parallel."""
    rank: int = 0

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        return self.world_size // self.pp

    @property
    def dp(self) -> int:
        """Replicas of the dense parameters, which share their optimizer state."""
        return self.stage_size // self.tp

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size of the experts."""
        return 1 if self.ep > 1 else self.tp

    @property
    def expert_dp(self) -> int:
        """Replicas of the experts, which share theirs."""
        return self.stage_size // (self.ep * self.expert_tp)

    @property
    def tp_rank(self) -> int:
        """Which of the tensor-parallel shards it holds."""
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        """Which replica of the dense parameters it belongs to."""
        return self.rank % self.stage_size // self.tp

    @property
    def pp_rank(self) -> int:
        """Its pipeline stage."""
        return self.rank // self.stage_size

    @property
    def ep_rank(self) -> int:
        """Which share of the experts it holds."""
        return self.rank % self.stage_size // self.expert_tp % self.ep

    @property
    def expert_dp_rank(self) -> int:
        """Which replica of the experts it belongs to."""
        return self.rank % self.stage_size // (self.expert_tp * self.ep)

    @property
    def first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pp_rank == self.pp - 1

    def in_node(self, ranks_per_node: int) -> ParallelLayout:
        """The same among the ranks of its node alone, which hold whole replicas of the model between them."""
        if ranks_per_node >= self.world_size:
            return self
        share = ranks_per_node // self.pp
        here = self.pp_rank * share + self.rank % self.stage_size % share
        return ParallelLayout(ranks_per_node, self.tp, self.pp, self.ep, here)

    def nodes(self, ranks_per_node: int) -> list[list[int]]:
        """The ranks of each node, in the order of its devices: whole replicas, so of each stage the same share.

        Stages are outermost among the ranks, and those of a replica lie on one node all the same.
        """
        if ranks_per_node >= self.world_size:
            return [list(range(self.world_size))]
        share = ranks_per_node // self.pp
        stages = range(0, self.world_size, self.stage_size)
        return [
            [stage + rank for stage in stages for rank in range(first, first + share)]
            for first in range(0, self.stage_size, share)
        ]

    def replicas(self, *, experts: bool) -> list[int]:
        """Ranks that hold the parameters of this one, in the order in which they share the optimizer state."""
        width = self.expert_tp * self.ep if experts else self.tp
        stage = self.pp_rank * self.stage_size
        return list(range(stage + self.rank % self.stage_size % width, stage + self.stage_size, width))

    def every_rank(self) -> list[ParallelLayout]:
        """The same for each rank."""
        return [replace(self, rank=rank) for rank in range(self.world_size)]

    def same_cut(self, other: ParallelLayout) -> bool:
        """Whether the parallel sizes are equal, wherever the two ranks stand."""
        return replace(self, rank=0) == replace(other, rank=0)

    def sizes(self) -> str:
        """The parallel sizes, for people."""
        trainers = f"{self.world_size} trainer{'s' if self.world_size > 1 else ''}"
        return f"{trainers}: tensor {self.tp}, pipeline {self.pp}, expert {self.ep}, data {self.dp}"

    def coordinates(self) -> dict[str, int]:
        """Plain values for a checkpoint: which rank saved a file."""
        names = ("rank", "world_size", "tp", "tp_rank", "pp", "pp_rank", "ep", "ep_rank", "dp", "dp_rank")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of_training(cls, training: TrainingSpec, world_size: int, rank: int = 0) -> ParallelLayout:
        """The layout that a manifest asks for."""
        return cls(world_size, training.tensor_parallel, training.pipeline_parallel, training.expert_parallel, rank)

    @classmethod
    def of_coordinates(cls, saved: Mapping[str, int]) -> ParallelLayout:
        """The layout of a rank that saved these `coordinates`."""
        return cls(saved["world_size"], saved["tp"], saved["pp"], saved["ep"], saved["rank"])


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


def check_nodes(training: TrainingSpec, ranks_per_node: int, nodes: int) -> None:
    """Refuse parallel sizes by which a node holds no whole replicas; ValueError names the field.

    Weights go from trainers to engines inside a node only.
    """
    stages = training.pipeline_parallel
    for field, size in (
        ("pipelineParallel", 1),
        ("tensorParallel", training.tensor_parallel),
        ("expertParallel", training.expert_parallel),
    ):
        if nodes > 1 and ranks_per_node % (size * stages):
            what = f"{size} in each of {stages} pipeline stages" if size > 1 and stages > 1 else f"{size * stages}"
            raise ValueError(
                f"training.{field}: {what} does not divide resources.devicesPerNode {ranks_per_node}, so a group would "
                "lie on two nodes; each node must hold whole copies of the model"
            )
