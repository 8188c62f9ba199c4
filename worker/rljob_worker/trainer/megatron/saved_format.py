"""Parts of Hugging Face tensors in the states of Megatron's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rljob_api.spec import LoraSpec
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.manifest import hf_manifest
from rljob_worker.models.value_model import value_config
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.tensor_slice import Piece
from rljob_worker.trainer.megatron.models.convert import is_expert, local_pieces


def saved_format(model_folder: Path, lora: LoraSpec | None) -> MegatronFormat:
    """The format for the model of a folder; ValueError with adapters, which Megatron does not train."""
    if lora is not None:
        raise ValueError("training.lora: states of Megatron have no adapters")
    return MegatronFormat(ModelConfig.from_hf(model_folder))


def critic_format(model_folder: Path) -> MegatronFormat:
    """The format for the critic that begins with a folder."""
    return MegatronFormat(value_config(model_folder))


class MegatronFormat:
    """A `SavedFormat`: parameters by Megatron's names, the optimizer's state divided among replicas."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.manifest = hf_manifest(config)
        self.untrained = config.untrained
        self.lora: LoraSpec | None = None

    def pieces_of(self, shard: Mapping[str, Tensor], layout: ParallelLayout) -> list[Piece]:
        """The Hugging Face tensors' parts in a rank's parameters."""
        return local_pieces(shard, self._config, layout)

    def may_be_primary(self, at: ParallelLayout) -> bool:
        """Whether it belongs to the first replica of the dense parameters, or of the experts."""
        return at.dp_rank == 0 or at.expert_dp_rank == 0

    def sharers(self, parameter: str, at: ParallelLayout) -> list[int]:
        """The replicas of the parameter, each of which has a flat part."""
        return at.replicas(experts=is_expert(parameter))
