"""Everything that one Megatron rank is made of: its place among the others, and models there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_api import derived
from rljob_api.spec import CriticSpec, Precision, RLJobSpec, TrainingSpec
from rljob_worker.devices import Device
from rljob_worker.memory.sleeping import Region, SleepingMemory, shareable, sleeping_memory
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.value_model import value_config
from rljob_worker.models.weight_files import tensor_files
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.tensor_slice import Piece
from rljob_worker.trainer.megatron.flat_buffers import move_buffers
from rljob_worker.trainer.megatron.models.platforms import megatron_platform
from rljob_worker.trainer.megatron.optimizer_state import OptimizerState
from rljob_worker.trainer.megatron.parallel_state import initialize
from rljob_worker.trainer.process_groups import ProcessGroups
from rljob_worker.trainer.state_file import CRITIC, POLICY
from rljob_worker.upstream.install import install
from rljob_worker.upstream.megatron_types import ChainedOptimizer, DistributedDataParallel
from rljob_worker.upstream.patch import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRank:
    """This process among the trainers; models that are built in it share groups and memory.

    Attributes:
        groups: all that the rank is in.
        memory: where its tensors are and sleep; None where the memory saver is off.
        tp_group: ranks that share the vocabulary; None when there is one.
        cp_group: ranks that divide each row of samples; None when there is one.
    """

    layout: ParallelLayout
    groups: ProcessGroups
    memory: SleepingMemory | None
    tp_group: dist.ProcessGroup | None
    cp_group: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState(JoinedRank):
    """One rank's model and optimizer.

    Attributes:
        model_folder: Hugging Face folder with the starting weights.
        ddp: Megatron's DistributedDataParallel around the bare GPTModel.
        optimizer: Megatron's chained distributed optimizers.
        parameters: flat buffers that hold all parameters.
        state: the optimizer's tensors.
        stem: of the names of its files: the policy's or the critic's.
    """

    config: ModelConfig
    model_folder: Path
    ddp: DistributedDataParallel
    optimizer: ChainedOptimizer
    parameters: list[Tensor]
    state: OptimizerState
    stem: str = POLICY

    def named_parameters(self) -> dict[str, Tensor]:
        """This rank's parameters by Megatron name."""
        return {name: parameter.detach() for name, parameter in self.ddp.module.named_parameters()}

    @property
    def readable(self) -> Callable[[Tensor], Tensor]:
        """A tensor's content, asleep or awake."""
        return self.memory.readable if self.memory is not None else torch.Tensor.detach


def join_ranks(spec: RLJobSpec, device: Device, *, rank: int, world_size: int, store: str) -> JoinedRank:
    """Patch what this process trains with, join the other ranks and seed; once in a process, collective."""
    platform = megatron_platform(device.name)
    install(Process.TRAINER, device.name, spec.training.backend)
    device.set_current()
    # First of all: its check lets the device's memory sleep once, and a preloaded library that is not in never will be.
    memory = sleeping_memory(spec.memory_saver.mode, device)
    layout, groups, cp_group = initialize(
        spec.training,
        rank=rank,
        world_size=world_size,
        store=store,
        backend=device.process_group_backend,
        timeout_seconds=min(spec.timeouts.start_seconds, spec.timeouts.phase_seconds),
    )
    torch.manual_seed(spec.seed)
    platform.seed(spec.seed)

    from megatron.core import parallel_state

    tp_group = parallel_state.get_tensor_model_parallel_group() if layout.tp > 1 else None
    return JoinedRank(layout=layout, groups=groups, memory=memory, tp_group=tp_group, cp_group=cp_group)


def build_rank_state(joined: JoinedRank, spec: RLJobSpec, device: Device, model_folder: Path) -> RankState:
    """Build the policy with the checkpoint's weights, and its optimizer; collective over those that joined."""
    from rljob_worker.models.hf_io import load_hf_weights

    config = ModelConfig.from_hf(model_folder)
    load = partial(load_hf_weights, folder=model_folder)
    replay = spec.rollout.router_replay
    shared = not derived.has_slots(spec)
    return _built(joined, spec.training, device, config, model_folder, load, router_replay=replay, shared=shared)


def build_critic_state(
    joined: JoinedRank, spec: RLJobSpec, critic: CriticSpec, device: Device, model_folder: Path
) -> RankState:
    """Build the critic beside the policy, in the same memory and groups; collective.

    Raises:
        UserError: a model or a checkpoint that does not fit; names the tensor.
    """
    from rljob_worker.models.hf_io import read_pieces

    config, files = value_config(model_folder), tensor_files(model_folder)

    def load(pieces: list[Piece]) -> None:
        # A head that the folder does not have stays 0.
        read_pieces([piece for piece in pieces if piece.hf_name in files], files)

    training = spec.training.model_copy(update={"optimizer": derived.critic_optimizer(spec, critic)})
    return _built(joined, training, device, config, model_folder, load, stem=CRITIC)


def _built(
    joined: JoinedRank,
    training: TrainingSpec,
    device: Device,
    config: ModelConfig,
    model_folder: Path,
    load: Callable[[list[Piece]], None],
    *,
    router_replay: bool = False,
    shared: bool = False,
    stem: str = POLICY,
) -> RankState:
    from rljob_worker.trainer.megatron.models.build import build_gpt_model
    from rljob_worker.trainer.megatron.models.convert import local_pieces
    from rljob_worker.trainer.megatron.optimizer import build_optimizer, wrap_model

    layout, memory = joined.layout, joined.memory
    model = build_gpt_model(
        config,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        dtype=torch.bfloat16 if training.precision is Precision.BF16 else torch.float32,
        recompute=training.recompute.value,
        router_replay=router_replay,
        device=device.name,
        cp_group=joined.cp_group,
    )
    region: Region = nullcontext if memory is None else memory.region
    ddp = wrap_model(model)
    parameters = move_buffers(ddp, region, device.empty_cache, partial(shareable, device, memory) if shared else None)
    load(local_pieces(ddp.module, config, layout))
    optimizer = build_optimizer(ddp, training, device.process_group_backend)
    offload = training.optimizer.host_offload
    # Host memory does not sleep: what is offloaded stays outside the memory saver.
    overlap = device.overlap if offload and device.own_memory else None
    state = OptimizerState(optimizer, ddp, nullcontext if offload else region, overlap=overlap)
    return RankState(
        layout=layout,
        groups=joined.groups,
        memory=memory,
        tp_group=joined.tp_group,
        cp_group=joined.cp_group,
        config=config,
        model_folder=model_folder,
        ddp=ddp,
        optimizer=optimizer,
        parameters=parameters,
        state=state,
        stem=stem,
    )
