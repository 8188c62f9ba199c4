"""The `judge` reward with a model of the job's own: responses to the texts that it judges, and what it said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api import RLJobSpec, derived
from rljob_api.safe_text import visible_line
from rljob_api.spec import JudgeKind, JudgeSpec
from rljob_worker.data.bounded import within_bounds
from rljob_worker.data.hub import folder_beside
from rljob_worker.data.sources import TURNS
from rljob_worker.data.special_texts import SpecialTexts
from rljob_worker.data.tokenizer import load_tokenizer
from rljob_worker.errors import UserError
from rljob_worker.models.judge_model import JudgeFacts, Said
from rljob_worker.rewards.functions import RewardFailure, Sample, Score, representable
from rljob_worker.rewards.judge_texts import (
    Lacking,
    Verdicts,
    chat_messages,
    check_columns,
    compiled_prompt,
    rendered,
)
from rljob_worker.waiting import waiting_for

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

_QUOTED = 300
"""Characters of an answer that an error quotes."""


class ModelJudge:
    """A judge of the job's own: its texts, and its verdicts.

    Args:
        spec: it; it has a model.
        place: its place in the manifest.
        folder: of its model.
        tokenizer: of that folder.

    Raises:
        UserError: the folder holds no model of this kind, or nothing says how a text is written for it.
    """

    def __init__(self, spec: JudgeSpec, place: str, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        assert spec.model is not None
        self.spec, self.folder = spec, folder
        self.writes = spec.kind is JudgeKind.CHAT
        self.facts = JudgeFacts.of(folder, spec.model, spec.kind, f"{place}.model.path")
        self._tokenizer, self._special = tokenizer, SpecialTexts(tokenizer)
        self._lacking, self._verdicts = Lacking(spec.max_error_share), Verdicts(spec.verdict)
        self._template: Template | None = None
        self._asked = set[str]()
        if self.writes or spec.prompt is not None:
            self._template, self._asked = compiled_prompt(spec)
        self._longest = self.facts.max_tokens - (spec.max_tokens if self.writes else 0)
        self._check_place(place)

    def _check_place(self, place: str) -> None:
        if self._longest < 1:
            raise UserError(
                f"{place}.maxTokens: {self.spec.max_tokens} leaves no room for a text; the model takes "
                f"{self.facts.max_tokens} tokens (model.maxTokens, max_position_embeddings)"
            )
        if not self._tokenizer.chat_template and self.writes:
            raise UserError(f"{place}.model.path: the tokenizer of {self.folder} has no chat template")
        if not self._tokenizer.chat_template and self._template is None:
            raise UserError(
                f"{place}.prompt: is needed, since the tokenizer of {self.folder} has no chat template: the whole "
                "text, like '{{ prompt }} {{ response }}'"
            )

    def check(self, columns: frozenset[str] | None) -> None:
        """UserError where its prompt asks for what no row has."""
        if columns is not None:
            check_columns(self.spec, self._asked, columns)

    def tokens(self, sample: Sample) -> list[int]:
        """The text about a response, in the judge's tokens.

        What the policy wrote becomes none of the special tokens, with which a template tells turns apart.

        Raises:
            ValueError: it cannot be rendered, or is longer than the model takes.
        """
        response = self._unspecial(sample["response"])
        broken: dict[str, Any] = {"response": response}
        metadata = sample.get("metadata") or {}
        if TURNS in metadata:
            # What the policy did in them, and what of that an environment repeats.
            broken["metadata"] = {**metadata, TURNS: self._unspecial(metadata[TURNS])}
        sample = {**sample, **broken}
        if self._template is None:
            asked = sample["messages"] or [{"role": "user", "content": sample["prompt"]}]
            text, whole = self._chat([*map(dict, asked), {"role": "assistant", "content": response}]), False
        elif self.writes:
            text, whole = self._chat(chat_messages(self._template, self.spec, sample)), False
        else:
            text, whole = rendered(self._template, self.spec, sample), True
        # A chat template writes the special tokens itself.
        ids = list(self._tokenizer(text, add_special_tokens=whole)["input_ids"])
        if not ids:
            raise ValueError(f"judge {self.spec.name}: the text for it is empty")
        if len(ids) > self._longest:
            beside = f" beside an answer of {self.spec.max_tokens}" if self.writes else ""
            raise ValueError(
                f"judge {self.spec.name}: the text for it has {len(ids)} tokens, more than the {self._longest} "
                f"that it takes{beside} (model.maxTokens, max_position_embeddings)"
            )
        return ids

    def verdict(self, said: float | Said, *, last: bool) -> Score | RewardFailure | None:
        """Score in what the model said, or why there is none; None where it is to be asked once more.

        Args:
            said: a number, or its answer.
            last: whether it is not asked again.
        """
        found: float | str
        if isinstance(said, Said):
            found = self._verdicts.read(said.text, cut=said.cut)
            text = said.text if len(said.text) <= _QUOTED else f"{said.text[:_QUOTED]} ..."
            why = f"{found}: {visible_line(text)!r}"
        else:
            try:
                found = representable(said, "the score")
            except ValueError as error:
                found = why = f"its model gave {said}: {error}"
        if isinstance(found, float):
            self._lacking.count(False)
            return Score(found, {}, said.text if isinstance(said, Said) else None)
        return self.lacks(f"judge {self.spec.name}: {why}") if last or not self.writes else None

    def lacks(self, why: str) -> RewardFailure:
        """A response without a score, which is an outage where too many are."""
        self._lacking.count(True)
        many = self._lacking.too_many()
        return RewardFailure(why) if many is None else RewardFailure(f"judge {self.spec.name}: {many}; {why}", True)

    def _unspecial(self, value: Any) -> Any:
        """A value whose texts, at any depth, hold no special token."""
        if isinstance(value, str):
            return self._special.broken(value)[0]
        if isinstance(value, list | tuple):
            return [self._unspecial(item) for item in value]
        if isinstance(value, dict):
            return {self._unspecial(key): self._unspecial(item) for key, item in value.items()}
        return value

    def _chat(self, messages: list[dict[str, str]]) -> str:
        try:
            return within_bounds(
                lambda: self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=self.writes)
            )
        except Exception as error:
            raise ValueError(f"judge {self.spec.name}: its chat template fails: {error}") from error


@dataclass(frozen=True, slots=True)
class Questions:
    """Texts that a judge's model is to judge."""

    texts: Sequence[Sequence[int]]
    seeds: Sequence[int]
    writes: bool
    """Whether it answers in words."""
    answer: Callable[[Sequence[float | Said]], Questions | None]
    """Takes what it said, in the order of the texts; gives what it is to be asked once more."""


def model_judge(spec: RLJobSpec) -> ModelJudge | None:
    """The judge with `model`, its checkpoint here; None where no judge has one.

    Raises:
        UserError: it cannot be fetched, is no model that scores, has no tokenizer, or nothing says how a text is
            written for it.
    """
    judge = derived.judge_model(spec)
    if judge is None or judge.model is None:
        return None
    place = f"spec.judges[{spec.judges.index(judge)}]"
    folder = folder_beside(judge.model.path, spec.model.hub, f"{place}.model")
    with waiting_for(f"the judge in {folder} to be looked at"):
        try:
            tokenizer = load_tokenizer(folder)
        except UserError as error:
            raise UserError(f"{place}.model.path: of {folder}: {error}") from None
        return ModelJudge(judge, place, folder, tokenizer)
