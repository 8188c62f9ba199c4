"""The checkpoint that a critic starts from, checked before any process is started."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api import RLJobSpec, derived
from rljob_api.spec import TrainingBackend, TrainingSpec
from rljob_worker.data.hub import folder_beside
from rljob_worker.data.tokenizer import load_tokenizer
from rljob_worker.errors import UserError
from rljob_worker.models.config import check_context, check_model_sizes
from rljob_worker.models.facts import ModelFacts
from rljob_worker.models.hf_check import checkpoint_bytes
from rljob_worker.models.hf_model import packs_rows, row_obstacle
from rljob_worker.models.json_files import check_json_files
from rljob_worker.models.places import CRITIC_PATH
from rljob_worker.models.value_model import build_value_model, value_config
from rljob_worker.waiting import waiting_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIELD = "spec.critic.model"
_STATE_BYTES = 12
"""Bytes of a parameter in FSDP's checkpoint: fp32, and Adam's two moments."""


def critic_start(
    spec: RLJobSpec, tokenizer: PreTrainedTokenizerBase, policy: Path, longest: int
) -> tuple[Path | None, int]:
    """The folder of `critic.model`, None where the critic starts from the policy's or there is none; and the bytes of
    its checkpoint.

    Args:
        spec: the job.
        tokenizer: the policy's.
        policy: the policy's folder.
        longest: tokens of the longest sequence that is trained on.

    Raises:
        UserError: it cannot be fetched, is none of a model of text, lacks tensors, has another tokenizer, or takes
            shorter sequences only.
    """
    critic = derived.critic(spec)
    if critic is None:
        return None, 0
    if critic.model is None:
        return None, _checkpoint_bytes(spec.training, policy)
    folder = folder_beside(critic.model.path, spec.model.hub, CRITIC_PATH)
    check_json_files(folder)
    with waiting_for(f"the weights in {folder} to be looked at"):
        size = _checkpoint_bytes(spec.training, folder)
    facts = ModelFacts.from_hf(folder)
    try:
        own = load_tokenizer(folder).get_vocab()
    except UserError as error:
        raise UserError(str(error).replace("spec.model:", f"{_FIELD}:", 1)) from None
    ours = tokenizer.get_vocab()
    if own != ours:
        differing = sorted(token for token in own.keys() | ours.keys() if own.get(token) != ours.get(token))
        raise UserError(
            f"{CRITIC_PATH}: {folder} has another tokenizer than spec.model: {len(differing)} tokens have another id, "
            f"{differing[0]!r} among them; a critic reads the policy's tokens"
        )
    if facts.vocab_size < len(tokenizer):
        raise UserError(
            f"{CRITIC_PATH}: the tokenizer has {len(tokenizer)} tokens, the embedding in {folder} {facts.vocab_size}"
        )
    if facts.max_position_embeddings < longest:
        raise UserError(
            f"{CRITIC_PATH}: {folder} takes {facts.max_position_embeddings} tokens (max_position_embeddings); the job "
            f"trains on sequences of up to {longest}"
        )
    return folder, size


def _checkpoint_bytes(training: TrainingSpec, folder: Path) -> int:
    """Bytes of a checkpoint of the critic that starts from a folder.

    Raises:
        UserError: a model that the backend does not train, that lacks tensors, or that the job's parallel sizes do not
            divide.
    """
    if training.backend is TrainingBackend.MEGATRON:
        config = value_config(folder)
        check_model_sizes(config, training)
        return checkpoint_bytes(config, training.precision)
    built = build_value_model(folder)
    obstacle = row_obstacle(built.model, packed=packs_rows(folder))
    check_context(ModelFacts.from_hf(folder), training.context_parallel, obstacle)
    return _STATE_BYTES * sum(math.prod(view.shape) for view in built.views)
