"""Everything that one trainer rank is made of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_api.spec import MemorySaverMode, Precision, RLJobSpec
from rljob_worker.devices import Device
from rljob_worker.memory.arena import Arena
from rljob_worker.models import megatron_cpu
from rljob_worker.models.config import ModelConfig
from rljob_worker.trainer.flat import OptimizerState, Region, move_buffers
from rljob_worker.trainer.parallel import Coordinates, initialize


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's model and optimizer.

    Attributes:
        ddp: Megatron's DistributedDataParallel around the bare GPTModel.
        optimizer: Megatron's chained distributed optimizers.
        parameters: flat buffers that hold all parameters.
        state: the optimizer's tensors.
        arena: memory of all these; None where the memory saver is off.
        tp_group: ranks that share the vocabulary; None when there is one.
    """

    coordinates: Coordinates
    config: ModelConfig
    ddp: Any
    optimizer: Any
    parameters: list[Tensor]
    state: OptimizerState
    arena: Arena | None
    tp_group: dist.ProcessGroup | None

    def named_parameters(self) -> dict[str, Tensor]:
        """This rank's parameters by Megatron name."""
        return {name: parameter.detach() for name, parameter in self.ddp.module.named_parameters()}

    @property
    def readable(self) -> Callable[[Tensor], Tensor]:
        """A tensor's content, asleep or awake."""
        return self.arena.readable if self.arena is not None else torch.Tensor.detach


def build_rank(spec: RLJobSpec, device: Device, *, rank: int, world_size: int, store: str, model_folder: Path) -> Rank:
    """Join the other ranks, build the model with the checkpoint's weights, and the optimizer; collective."""
    if device.name == "cpu":
        megatron_cpu.install()
    training = spec.training
    coordinates = initialize(
        training,
        rank=rank,
        world_size=world_size,
        store=store,
        backend=device.process_group_backend,
        timeout_seconds=min(spec.timeouts.start_seconds, spec.timeouts.phase_seconds),
    )
    torch.manual_seed(spec.seed)
    if device.name == "cpu":
        megatron_cpu.finish(spec.seed)

    from megatron.core import parallel_state

    from rljob_worker.models.build import build_gpt_model
    from rljob_worker.models.convert import Parallel, local_pieces
    from rljob_worker.models.hf_io import load_hf_weights
    from rljob_worker.trainer.megatron import build_optimizer, wrap_model

    config = ModelConfig.from_hf(model_folder)
    model = build_gpt_model(
        config,
        tp=coordinates.tp,
        pp=coordinates.pp,
        ep=coordinates.ep,
        dtype=torch.bfloat16 if training.precision is Precision.BF16 else torch.float32,
        recompute=training.recompute.value,
        device=device.name,
    )
    arena = None if spec.memory_saver.mode is MemorySaverMode.OFF else Arena()
    region: Region = nullcontext if arena is None else arena.region
    ddp = wrap_model(model)
    parameters = move_buffers(ddp, region)
    load_hf_weights(local_pieces(ddp.module, config, Parallel.current()), model_folder)
    optimizer = build_optimizer(ddp, training, device.process_group_backend)
    # Host memory does not sleep: what is offloaded stays outside the memory saver.
    state = OptimizerState(optimizer, ddp, nullcontext if training.optimizer.host_offload else region)
    return Rank(
        coordinates=coordinates,
        config=config,
        ddp=ddp,
        optimizer=optimizer,
        parameters=parameters,
        state=state,
        arena=arena,
        tp_group=parallel_state.get_tensor_model_parallel_group() if coordinates.tp > 1 else None,
    )
