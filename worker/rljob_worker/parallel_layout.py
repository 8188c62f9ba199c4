"""Division of the model and of the samples among the trainers of a job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rljob_api.how_many import how_many
from rljob_api.spec import TrainingBackend, TrainingSpec


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Parallel sizes, in ranks, and where one of the ranks stands.

    Ranks are numbered as Megatron does by default (`parallel_state.initialize_model_parallel`, order tp-cp-ep-dp-pp):
    tensor parallelism is innermost, then replicas, pipeline stages are outermost. The ranks of a stage hold the experts
    in a cut of their own: where those are dealt out, tensor parallelism does not cut them. Ranks that divide a row of
    samples by context parallelism are replicas to Megatron, neighbours among them.
    """

    world_size: int = 1
    tp: int = 1
    """Tensor parallel."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert parallel."""
    rank: int = 0
    shards: int = 1
    """Ranks that divide one copy of the parameters row by row, and gather them where they compute: neighbours."""
    cp: int = 1
    """Context parallel: ranks that divide the tokens of each row."""

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        return self.world_size // self.pp

    @property
    def dp(self) -> int:
        """Replicas of the dense parameters, which share their optimizer state."""
        return self.stage_size // self.tp

    @property
    def samples(self) -> int:
        """Parts that the samples of an update are dealt to."""
        return self.dp // self.cp

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
        """Tensor-parallel shard that it holds."""
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        """Replica of the dense parameters that it belongs to."""
        return self.rank % self.stage_size // self.tp

    @property
    def cp_rank(self) -> int:
        """Number of the share of each row's tokens that it computes."""
        return self.dp_rank % self.cp

    @property
    def samples_rank(self) -> int:
        """Number of the part of the samples that it is dealt."""
        return self.dp_rank // self.cp

    @property
    def pp_rank(self) -> int:
        """Its pipeline stage."""
        return self.rank // self.stage_size

    @property
    def ep_rank(self) -> int:
        """Share of the experts that it holds."""
        return self.rank % self.stage_size // self.expert_tp % self.ep

    @property
    def expert_dp_rank(self) -> int:
        """Replica of the experts that it belongs to."""
        return self.rank % self.stage_size // (self.expert_tp * self.ep)

    @property
    def first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pp_rank == self.pp - 1

    @property
    def answers(self) -> bool:
        """Whether this rank's results of its samples count: several have the same, or none."""
        return self.last_stage and self.tp_rank == self.cp_rank == 0

    def nodes_of_replica(self, ranks_per_node: int) -> int:
        """Number of nodes that hold whole replicas of the model between them: one, where a node has room for all
        stages."""
        group = math.lcm(self.tp * self.cp, self.expert_tp * self.ep, self.shards) * self.pp
        return 1 if ranks_per_node >= self.world_size else group // math.gcd(ranks_per_node, group)

    def among_replicas(self, ranks_per_node: int) -> ParallelLayout:
        """The same among the ranks of its node alone, or of the nodes that hold whole replicas together."""
        size = ranks_per_node * self.nodes_of_replica(ranks_per_node)
        if size >= self.world_size:
            return self
        share = size // self.pp
        rank = self.pp_rank * share + self.rank % self.stage_size % share
        return replace(self, world_size=size, rank=rank)

    def place_in_node(self, ranks_per_node: int) -> int:
        """Its position among the ranks of its node, in the order of the node's devices."""
        return self.among_replicas(ranks_per_node).rank % ranks_per_node

    def nodes(self, ranks_per_node: int) -> list[list[int]]:
        """The ranks of each node, in the order of its devices; nodes that hold whole replicas together are neighbours.

        Stages are outermost among the ranks, and those of a replica lie on as few nodes as can hold them all the same.
        """
        size = min(ranks_per_node * self.nodes_of_replica(ranks_per_node), self.world_size)
        share = size // self.pp
        stages = range(0, self.world_size, self.stage_size)
        dealt = [
            stage + rank
            for first in range(0, self.stage_size, share)
            for stage in stages
            for rank in range(first, first + share)
        ]
        return [dealt[first : first + ranks_per_node] for first in range(0, self.world_size, ranks_per_node)]

    def replicas(self, *, experts: bool) -> list[int]:
        """Ranks that hold the parameters of this one, in the order in which they share the optimizer state."""
        width = self.expert_tp * self.ep if experts else self.tp
        stage = self.pp_rank * self.stage_size
        return list(range(stage + self.rank % self.stage_size % width, stage + self.stage_size, width))

    def every_rank(self) -> list[ParallelLayout]:
        """The same for each rank."""
        return [replace(self, rank=rank) for rank in range(self.world_size)]

    def same_cut(self, other: ParallelLayout) -> bool:
        """Whether ranks hold the same parts of the state, wherever the two stand; which tokens they compute does not
        matter to it."""
        return replace(self, rank=0, cp=1) == replace(other, rank=0, cp=1)

    def sizes(self) -> str:
        """The parallel sizes, for people."""
        trainers = f"{self.world_size} trainer{'s' if self.world_size > 1 else ''}"
        shards = f", shards {self.shards}" if self.shards > 1 else ""
        context = f"context {self.cp}, " if self.cp > 1 else ""
        sizes = f"tensor {self.tp}, pipeline {self.pp}, {context}expert {self.ep}, data {self.samples}{shards}"
        return f"{trainers}: {sizes}"

    def coordinates(self) -> dict[str, int]:
        """Plain values for a checkpoint: which rank saved a file."""
        names = ("rank", "world_size", "tp", "tp_rank", "pp", "pp_rank", "ep", "ep_rank", "dp", "dp_rank")
        return {name: getattr(self, name) for name in (*names, "shards", "cp")}

    @classmethod
    def of_training(cls, training: TrainingSpec, world_size: int, rank: int = 0) -> ParallelLayout:
        """The layout that a manifest asks for."""
        given = training.fsdp and training.fsdp.shard_size
        shards = (given or world_size) if training.backend is TrainingBackend.FSDP else 1
        return cls(
            world_size=world_size,
            tp=training.tensor_parallel,
            pp=training.pipeline_parallel,
            ep=training.expert_parallel,
            rank=rank,
            shards=shards,
            cp=training.context_parallel,
        )

    @classmethod
    def of_coordinates(cls, saved: Mapping[str, int]) -> ParallelLayout:
        """The layout of a rank that saved these `coordinates`; older ones have no shards and no context."""
        shards, context = saved.get("shards", 1), saved.get("cp", 1)
        return cls(saved["world_size"], saved["tp"], saved["pp"], saved["ep"], saved["rank"], shards, context)


def check_sizes(training: TrainingSpec, world_size: int) -> None:
    """Refuse parallel sizes that do not fit the number of devices; ValueError names the field."""
    model = training.tensor_parallel * training.pipeline_parallel
    if training.fsdp is not None and world_size % (training.fsdp.shard_size or 1):
        raise ValueError(
            f"training.fsdp.shardSize: {training.fsdp.shard_size} does not divide the {how_many(world_size, 'device')}"
        )
    if world_size % model:
        raise ValueError(
            f"training.tensorParallel x training.pipelineParallel is {training.tensor_parallel} x "
            f"{training.pipeline_parallel} = {model}, which does not divide the {how_many(world_size, 'device')}"
        )
    if world_size // model % training.context_parallel:
        raise ValueError(
            f"training.contextParallel: {training.context_parallel} does not divide the {world_size // model} replicas "
            f"that {how_many(world_size, 'device')} hold by training.tensorParallel x training.pipelineParallel"
        )
    if (world_size // training.pipeline_parallel) % training.expert_parallel:
        raise ValueError(
            f"training.expertParallel: {training.expert_parallel} does not divide the "
            f"{how_many(world_size // training.pipeline_parallel, 'device')} of a pipeline stage"
        )


def check_nodes(training: TrainingSpec, ranks_per_node: int, nodes: int) -> None:
    """Refuse parallel sizes that the nodes cannot be dealt; ValueError names the field.

    Pipeline stages may lie on several nodes; what is cut by tensor, context or expert parallelism may not.
    """
    if nodes == 1:
        return
    for field, size in (
        ("tensorParallel", training.tensor_parallel),
        ("tensorParallel x training.contextParallel", training.tensor_parallel * training.context_parallel),
        ("expertParallel", training.expert_parallel),
    ):
        if ranks_per_node % size:
            raise ValueError(
                f"training.{field}: {size} does not divide resources.devicesPerNode {ranks_per_node}, so a group would "
                "lie on two nodes; only pipeline stages may"
            )
    layout = ParallelLayout.of_training(training, ranks_per_node * nodes)
    together = layout.nodes_of_replica(ranks_per_node)
    if nodes % together:
        if layout.shards > 1:
            raise ValueError(
                f"training.fsdp.shardSize: with {layout.shards} devices a copy of the model {together} nodes of "
                f"{ranks_per_node} devices hold whole copies between them, which does not divide the {nodes} nodes"
            )
        raise ValueError(
            f"training.pipelineParallel: with {training.pipeline_parallel} stages {together} nodes of {ranks_per_node} "
            f"devices hold whole copies of the model between them, which does not divide the {nodes} nodes"
        )
