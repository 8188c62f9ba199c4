"""A teacher beside Megatron's policy: another model in the same groups, without gradients or an optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from rljob_api.spec import Precision, RLJobSpec
from rljob_worker.devices import Device
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.cost import segment_cost
from rljob_worker.trainer.megatron.models.build import build_gpt_model
from rljob_worker.trainer.megatron.models.convert import local_pieces
from rljob_worker.trainer.megatron.models.platforms import megatron_platform
from rljob_worker.trainer.megatron.optimizer import prepare_for_schedules
from rljob_worker.trainer.megatron.pipeline import PipelineRunner
from rljob_worker.trainer.megatron.rank_state import JoinedRank
from rljob_worker.trainer.parked import ParkedWeights
from rljob_worker.trainer.stopping import StopAgreement


class FrozenModel(torch.nn.Module):
    """A bare model where schedules expect its DistributedDataParallel."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*args, **kwargs)


class MegatronTeacher:
    """A `TeacherBackend`: one rank's part of the teacher.

    Args:
        joined: the rank among the others.
        spec: the job.
        device: the rank's.
        folder: Hugging Face folder with its weights.
        agreement: on stops; one for all models of a rank.
    """

    def __init__(
        self, joined: JoinedRank, spec: RLJobSpec, device: Device, folder: Path, agreement: StopAgreement
    ) -> None:
        from rljob_worker.models.hf_io import load_hf_weights

        config, layout = ModelConfig.from_hf(folder), joined.layout
        model = build_gpt_model(
            config,
            tp=layout.tp,
            pp=layout.pp,
            ep=layout.ep,
            dtype=torch.bfloat16 if spec.training.precision is Precision.BF16 else torch.float32,
            device=device.name,
            cp_group=joined.cp_group,
        )
        prepare_for_schedules(model)
        frozen: Any = FrozenModel(model).to(device.torch_device).requires_grad_(False)
        load_hf_weights(local_pieces(model, config, layout), folder)
        self.vocab_size = config.vocab_size
        shares = megatron_platform(device.name).attention.shares_prompts and config.linear_attention is None
        self.segment_cost = segment_cost(config) if shares else None
        self.forward = PipelineRunner(frozen, layout, agreement, joined.tp_group, joined.cp_group).forward
        self._weights = ParkedWeights(parameter.detach() for parameter in model.parameters())

    def present(self) -> AbstractContextManager[None]:
        """Inside, the weights are on the device."""
        return self._weights
