"""A model that judges, as its folder has it, before any process is started."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from rljob_api import RLJobSpec, derived
from rljob_api.spec import JudgeKind, JudgeModel
from rljob_worker.errors import UserError
from rljob_worker.models.facts import read_hf_config
from rljob_worker.models.json_files import check_json_files
from rljob_worker.models.places import folder_or_elsewhere, judge_path
from rljob_worker.models.weight_files import names_by_file, tensor_files

_ARCHITECTURES = {
    JudgeKind.SCORE: ("ForSequenceClassification", "that scores is one of sequence classification"),
    JudgeKind.CHAT: ("ForCausalLM", "that writes is a causal language model"),
}
"""End of the architecture's name that a kind of judge needs, and that in words."""
_LABELS = 2
"""Labels where a config does not say: transformers leaves this number out."""


@dataclass(frozen=True, slots=True)
class Said:
    """Answer of a judge that writes."""

    text: str
    cut: bool
    """Whether it had more to say than it may."""


@dataclass(frozen=True, slots=True)
class JudgeFacts:
    """Sizes of a judge's model."""

    parameters: int
    max_tokens: int
    """Tokens of the longest text that it takes."""

    @classmethod
    def of(cls, folder: Path, judge: JudgeModel, kind: JudgeKind, field: str) -> JudgeFacts:
        """Read them; UserError, which begins with the manifest's `field`, where the folder holds no such model."""
        try:
            check_json_files(folder)
            config, files = read_hf_config(folder), tensor_files(folder)
        except UserError as error:
            raise UserError(f"{field}: of {folder}: {error}") from None
        named = config.get("architectures")
        architectures = [str(one) for one in named] if isinstance(named, list) else []
        end, needed = _ARCHITECTURES[kind]
        if not any(one.endswith(end) for one in architectures):
            there = ", ".join(architectures) or "none"
            raise UserError(f"{field}: {folder}: config.json has architectures {there}; a judge {needed} (...{end})")
        if kind is JudgeKind.SCORE and (labels := _labels(config)) != 1:
            raise UserError(f"{field}: {folder}: the model has {labels} labels; a score is one number, of one label")
        parameters = 0
        for path, names in names_by_file(files).items():
            with safe_open(path, framework="np") as file:
                parameters += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        longest = config.get("max_position_embeddings")
        return cls(parameters, min(judge.max_tokens, longest) if isinstance(longest, int) else judge.max_tokens)


def check_judge_folder(spec: RLJobSpec) -> None:
    """Refuse a judge's folder on this machine that holds no model that scores: UserError with its place."""
    judge = derived.judge_model(spec)
    if judge is None or judge.model is None:
        return
    place = judge_path(spec, judge)
    folder = folder_or_elsewhere(judge.model.path, place)
    if folder is not None:
        JudgeFacts.of(folder, judge.model, judge.kind, place)


def _labels(config: dict[str, object]) -> int:
    names = config.get("id2label")
    if isinstance(names, dict):
        return len(names)
    count = config.get("num_labels")
    return count if isinstance(count, int) else _LABELS
