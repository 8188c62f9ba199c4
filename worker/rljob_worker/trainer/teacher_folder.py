"""The checkpoint of a teacher, checked before any process is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api import RLJobSpec
from rljob_api.spec import Divergence
from rljob_worker.data.hub import folder_beside
from rljob_worker.data.tokenizer import load_tokenizer
from rljob_worker.errors import UserError
from rljob_worker.models.hf_check import check_hf_weights
from rljob_worker.models.json_files import check_json_files
from rljob_worker.models.places import TEACHER_PATH
from rljob_worker.models.trained import TrainedModel, check_trained_sizes, trained_model
from rljob_worker.waiting import waiting_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIELD = "spec.algorithm.distill"


def teacher_folder(
    spec: RLJobSpec, tokenizer: PreTrainedTokenizerBase, policy: TrainedModel, longest: int
) -> Path | None:
    """The folder of `algorithm.distill.teacher`; None where the algorithm has no teacher.

    Args:
        spec: the job.
        tokenizer: the policy's.
        policy: its model.
        longest: tokens of the longest sequence that is trained on.

    Raises:
        UserError: it cannot be fetched, the backend does not compute with it in this layout, it lacks tensors, has
            other ids than the policy, fewer tokens than `topK`, or takes shorter sequences only.
    """
    distill = spec.algorithm.distill
    if distill is None:
        return None
    folder = folder_beside(distill.teacher.path, spec.model.hub, TEACHER_PATH)
    check_json_files(folder)
    try:
        model = trained_model(spec.training.backend, folder)
        check_trained_sizes(model, spec.training)
        with waiting_for(f"the weights in {folder} to be looked at"):
            check_hf_weights(folder, model)
        others = load_tokenizer(folder)
    except UserError as error:
        raise UserError(f"{TEACHER_PATH}: of {folder}: {str(error).removeprefix('spec.model: ')}") from None
    common = min(policy.vocab_size, model.vocab_size)
    _check_ids(tokenizer, others, common, folder)
    if policy.vocab_size > common:
        raise UserError(
            f"{TEACHER_PATH}: {folder} has an embedding of {model.vocab_size} tokens, the policy of "
            f"{policy.vocab_size}: the policy may sample tokens that it cannot read; a teacher needs as many as its "
            "policy, padding included"
        )
    if distill.divergence is Divergence.TOP_K and distill.top_k > common:
        raise UserError(f"{_FIELD}.topK: {distill.top_k} is more than the vocabulary's {common} tokens")
    if model.max_position_embeddings < longest:
        raise UserError(
            f"{TEACHER_PATH}: {folder} takes {model.max_position_embeddings} tokens (max_position_embeddings); the job "
            f"trains on sequences of up to {longest}"
        )
    return folder


def _check_ids(ours: PreTrainedTokenizerBase, others: PreTrainedTokenizerBase, common: int, folder: Path) -> None:
    """Both must have the same token for each id below `common`, and the policy none beyond."""
    of_ours, of_theirs = ({number: token for token, number in one.get_vocab().items()} for one in (ours, others))
    differing = [number for number in range(common) if of_ours.get(number) != of_theirs.get(number)]
    differing += sorted(number for number in of_ours if number >= common)
    if differing:
        first = differing[0]
        raise UserError(
            f"{TEACHER_PATH}: {folder} has another tokenizer than spec.model: {len(differing)} ids mean other tokens, "
            f"id {first} among them: {of_ours.get(first)!r} for the policy, {of_theirs.get(first)!r} for the teacher; "
            "a teacher scores the policy's ids, so that it must be of one family with it"
        )
