"""Everything that one FSDP rank is made of: its place among the others, and the model there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from rljob_api import derived
from rljob_api.spec import (
    CriticSpec,
    LoraSpec,
    OptimizerSpec,
    Precision,
    Recompute,
    RLJobSpec,
    TrainingSpec,
)
from rljob_worker.devices import Device
from rljob_worker.memory.sleeping import Region, SleepingMemory, shareable, sleeping_memory
from rljob_worker.models.adapters import adapter_views, add_adapters, freeze
from rljob_worker.models.checkpoint_views import CheckpointView, called_as, check_headers, checkpoint_views
from rljob_worker.models.config import check_context
from rljob_worker.models.facts import ModelFacts
from rljob_worker.models.hf_io import check_tied_head, read_pieces, tensor_shapes
from rljob_worker.models.hf_model import build_hf_model, has_packed_attention, row_obstacle, tied_names, tower
from rljob_worker.models.pictures import PictureFacts
from rljob_worker.models.value_model import build_value_model
from rljob_worker.models.weight_files import tensor_files
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.trainer.context_parallel import context_group
from rljob_worker.trainer.fsdp.adapters import ShardedAdapters
from rljob_worker.trainer.fsdp.attention import register_packed_attention
from rljob_worker.trainer.fsdp.model import ShardedModel
from rljob_worker.trainer.fsdp.optimizer import ShardedAdamW
from rljob_worker.trainer.fsdp.pieces import pieces_of_rows
from rljob_worker.trainer.fsdp.placement import Shards, place_shards
from rljob_worker.trainer.process_groups import ProcessGroups
from rljob_worker.trainer.state_file import CRITIC, POLICY
from rljob_worker.upstream.install import install
from rljob_worker.upstream.patch import Process

if TYPE_CHECKING:
    from rljob_worker.models.hf_model import HfModel

GROUP_HOLDERS = (
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "torch.distributed.distributed_c10d",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A rank among the others, before it has a model.

    Attributes:
        groups: all that the rank is in.
        memory: where its tensors are and sleep; None where the memory saver is off.
        region: the same, as the context in which tensors are made.
        mesh: of the ranks that divide a copy of a model, and of those that have the same rows.
        context_group: those that divide each row of samples; None where each has whole rows.
    """

    layout: ParallelLayout
    groups: ProcessGroups
    memory: SleepingMemory | None
    device: Device
    region: Region
    mesh: DeviceMesh
    context_group: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank's model and optimizer.

    Attributes:
        memory: where its tensors are and sleep; None where the memory saver is off.
        device: where they are.
        model_folder: Hugging Face folder with the starting weights.
        views: of the model's tensors, which engines get.
        saved_views: of the tensors that checkpoints have, by transformers' names: the same, or the adapters alone.
        shards: the rows that this rank has.
        lora: the job's adapters, where it has any.
        adapters: them here.
        stem: of the names of its files: the policy's or the critic's.
    """

    layout: ParallelLayout
    memory: SleepingMemory | None
    device: torch.device
    model_folder: Path
    model: ShardedModel
    views: list[CheckpointView]
    saved_views: list[CheckpointView]
    shards: Shards
    optimizer: ShardedAdamW
    lora: LoraSpec | None = None
    adapters: ShardedAdapters | None = None
    stem: str = POLICY


def join_ranks(spec: RLJobSpec, device: Device, *, rank: int, world_size: int, store: str) -> Joined:
    """Join the other ranks; collective."""
    install(Process.TRAINER, device.name, spec.training.backend)
    device.set_current()
    # First of all: its check lets the device's memory sleep once, and a preloaded library that is not in never will be.
    memory = sleeping_memory(spec.memory_saver.mode, device)
    groups = ProcessGroups(
        store,
        rank=rank,
        world_size=world_size,
        backend=device.process_group_backend,
        timeout_seconds=min(spec.timeouts.start_seconds, spec.timeouts.phase_seconds),
        holders=GROUP_HOLDERS,
    )
    torch.manual_seed(spec.seed)
    layout = ParallelLayout.of_training(spec.training, world_size, rank)
    mesh = _mesh(groups, layout, device.torch_device.type)
    with groups.recording():
        context = context_group(layout)
    return Joined(
        layout=layout,
        groups=groups,
        memory=memory,
        device=device,
        region=nullcontext if memory is None else memory.region,
        mesh=mesh,
        context_group=context,
    )


def build_rank_state(joined: Joined, spec: RLJobSpec, model_folder: Path) -> RankState:
    """Build the policy with the checkpoint's weights and its optimizer; collective.

    Raises:
        UserError: a model or a checkpoint that does not fit; names the tensor.
    """
    training, layout, dtype = spec.training, joined.layout, _dtype(spec.training)
    model = build_hf_model(model_folder, attention=register_packed_attention())
    canonical = checkpoint_views(model)
    views, files = _checked_files(model, canonical, model_folder)
    if training.lora is not None:
        add_adapters(model, training.lora, dtype, str(model_folder))
    saved_views = canonical if training.lora is None else adapter_views(model)
    pictures = PictureFacts.of_folder(model_folder) if tower(model) else None
    sharded = _sharded(
        model, model_folder, joined, training, dtype if training.lora is None else None, pictures=pictures
    )
    shards = place_shards(model, _policy_region(joined, spec), joined.device.torch_device)
    read_pieces(pieces_of_rows(shards.rows, views, shards.sizes, layout), files)
    adapters = None
    if training.lora is not None:
        adapters = ShardedAdapters(model, shards, layout, joined.mesh.get_group(joined.mesh.ndim - 1), spec.seed)
        adapters.digest_base()
    return RankState(
        layout=layout,
        memory=joined.memory,
        device=joined.device.torch_device,
        model_folder=model_folder,
        model=sharded,
        views=views,
        saved_views=saved_views,
        shards=shards,
        optimizer=_optimizer(joined, shards, training.optimizer),
        lora=training.lora,
        adapters=adapters,
    )


def build_critic_state(joined: Joined, spec: RLJobSpec, critic: CriticSpec, model_folder: Path) -> RankState:
    """Build the critic beside the policy, in the same memory and groups, all of it trained; collective.

    Raises:
        UserError: a model or a checkpoint that does not fit; names the tensor.
    """
    built = build_value_model(model_folder, attention=register_packed_attention())
    sharded = _sharded(built.model, model_folder, joined, spec.training, _dtype(spec.training), critic=True)
    shards = place_shards(built.model, joined.region, joined.device.torch_device)
    pieces = pieces_of_rows(shards.rows, built.views, shards.sizes, joined.layout)
    # A head that the folder does not have stays 0.
    read_pieces([piece for piece in pieces if piece.hf_name in built.files], built.files)
    return RankState(
        layout=joined.layout,
        memory=joined.memory,
        device=joined.device.torch_device,
        model_folder=model_folder,
        model=sharded,
        views=built.views,
        saved_views=built.views,
        shards=shards,
        optimizer=_optimizer(joined, shards, derived.critic_optimizer(spec, critic)),
        stem=CRITIC,
    )


def build_frozen_model(joined: Joined, spec: RLJobSpec, model_folder: Path) -> tuple[ShardedModel, Shards]:
    """Build a model that is computed with and never trained, in the format of computation; collective.

    Its shards are in ordinary memory, and do not sleep with the policy's.

    Raises:
        UserError: a model or a checkpoint that does not fit; names the tensor.
    """
    model = build_hf_model(model_folder, attention=register_packed_attention())
    views, files = _checked_files(model, checkpoint_views(model), model_folder)
    freeze(model, _dtype(spec.training))
    training = spec.training.model_copy(update={"recompute": Recompute.NONE})
    sharded = _sharded(model, model_folder, joined, training, None)
    shards = place_shards(model, nullcontext, joined.device.torch_device)
    read_pieces(pieces_of_rows(shards.rows, views, shards.sizes, joined.layout), files)
    return sharded, shards


def _policy_region(joined: Joined, spec: RLJobSpec) -> Region:
    """The context in which the policy's rows are made: the memory saver's, unless engines copy from them."""
    if derived.has_slots(spec):
        return joined.region

    def region(_tag: str) -> AbstractContextManager[object]:
        return shareable(joined.device, joined.memory)

    return region


def _dtype(training: TrainingSpec) -> torch.dtype:
    return torch.bfloat16 if training.precision is Precision.BF16 else torch.float32


def _sharded(
    model: HfModel,
    folder: Path,
    joined: Joined,
    training: TrainingSpec,
    dtype: torch.dtype | None,
    *,
    critic: bool = False,
    pictures: PictureFacts | None = None,
) -> ShardedModel:
    obstacle = row_obstacle(model, packed=has_packed_attention(model))
    check_context(ModelFacts.from_hf(folder), joined.layout.cp, obstacle)
    return ShardedModel(
        model,
        joined.mesh,
        dtype,
        recompute=training.recompute is not Recompute.NONE,
        reshard_after_forward=training.fsdp is None or training.fsdp.reshard_after_forward,
        critic=critic,
        pictures=pictures,
        context_group=joined.context_group,
    )


def _optimizer(joined: Joined, shards: Shards, spec: OptimizerSpec) -> ShardedAdamW:
    # Host memory does not sleep: what is offloaded stays outside the memory saver.
    region: Region = nullcontext if spec.host_offload else joined.region
    overlap = joined.device.overlap if spec.host_offload and joined.device.own_memory else None
    return ShardedAdamW(shards.trained, spec, region, overlap=overlap)


def _checked_files(
    model: HfModel, views: list[CheckpointView], folder: Path
) -> tuple[list[CheckpointView], dict[str, Path]]:
    """The views by the folder's names, and name -> file of what they and the headers agree on."""
    files = tensor_files(folder)
    views = called_as(views, files)
    tied = dict(tied_names(model))
    check_headers(views, tensor_shapes(files), str(folder), may_have=list(tied))
    for name, table in tied.items():
        if name in files:
            check_tied_head(files, name, table)
    return views, files


def _mesh(groups: ProcessGroups, layout: ParallelLayout, device: str) -> DeviceMesh:
    """Mesh of groups that can be given up while the rank sleeps; over the world's own, FSDP would keep the old one."""
    ranks = torch.arange(layout.world_size).view(-1, layout.shards)
    with groups.recording():
        # All ranks make all groups, in the same order.
        shard = [dist.new_group(line) for line in ranks.tolist()][layout.rank // layout.shards]
        if len(ranks) == 1:
            return DeviceMesh.from_group(shard, device)
        copies = [dist.new_group(line) for line in ranks.T.tolist()][layout.rank % layout.shards]
    return DeviceMesh.from_group([copies, shard], device, mesh=ranks, mesh_dim_names=("copies", "shards"))
