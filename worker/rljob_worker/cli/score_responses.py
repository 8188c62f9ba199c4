"""The responses that `rljob score` scores: a data set's labels, or those of a trajectory file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rljob_api.spec import RLJobSpec
from rljob_worker.cli.response_rows import read_rows
from rljob_worker.data.dataset import PromptSource, load_evaluation_prompts
from rljob_worker.data.renderer import ScoredRows
from rljob_worker.data.sources import LoadedSource
from rljob_worker.errors import UserError
from rljob_worker.rewards.score_calls import RewardSample
from rljob_worker.rewards.trial import Candidate
from rljob_worker.types import Generation, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 256


@dataclass(frozen=True, slots=True)
class ResponseSet:
    """Responses of one of the job's sources."""

    source: LoadedSource
    evaluation: bool
    count: int
    candidates: Iterator[Candidate]
    """Read as they are needed."""


class Data:
    """The job's prompts, by source and row.

    Raises:
        UserError: on construction, where a source cannot be used.
    """

    def __init__(self, spec: RLJobSpec, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.training = PromptSource(spec, tokenizer)
        scored = self.training.scored()
        self._sources = {one.loaded.name: one.loaded for one in scored}
        self._left_out = {one.loaded.name: one.left_out for one in scored}
        held_out: list[ScoredRows] = []
        prompts = load_evaluation_prompts(spec, tokenizer, scored=held_out)
        self._held_out_sources = {one.loaded.name: one.loaded for one in held_out}
        self._held_out = {prompt.uid: prompt for prompt in prompts}
        self.routed = {one.loaded.field: one.routed for one in scored + held_out if one.routed is not None}

    def labels(self, rows: int | None) -> list[ResponseSet]:
        """Labels as responses, of the first `rows` rows of each source that has labels."""
        sets = []
        for name, loaded in self._sources.items():
            kept = [row for row in range(len(loaded.rows)) if row not in self._left_out[name]]
            uids = [f"{name}/{row}" for row in kept[:rows]]
            sets.append(ResponseSet(loaded, False, len(uids), self._label_candidates(loaded, self._drawn(uids))))
        for name, loaded in self._held_out_sources.items():
            prompts = [prompt for prompt in self._held_out.values() if prompt.source == name][:rows]
            sets.append(ResponseSet(loaded, True, len(prompts), self._label_candidates(loaded, prompts)))
        return [found for found in sets if found.source.source.label_key is not None]

    def without_labels(self) -> list[LoadedSource]:
        """Sources that have no labels."""
        sources = [*self._sources.values(), *self._held_out_sources.values()]
        return [loaded for loaded in sources if loaded.source.label_key is None]

    def responses(self, file: Path, rows: int | None) -> list[ResponseSet]:
        """Responses of a file, the first `rows` of them, by source.

        Raises:
            UserError: naming the file and the line that is no response to a prompt of the data.
        """
        found: dict[tuple[str, bool], list[Candidate]] = {}
        for place, row in islice(read_rows(file), rows):
            candidate, held_out = self._response(place, row)
            found.setdefault((candidate.sample.prompt.source, held_out), []).append(candidate)
        if not found:
            raise UserError(f"--responses: {file} has no responses")
        return [
            ResponseSet(
                (self._held_out_sources if held_out else self._sources)[name],
                held_out,
                len(candidates),
                iter(sorted(candidates, key=_group(candidates))),
            )
            for (name, held_out), candidates in found.items()
        ]

    def _drawn(self, uids: Sequence[str]) -> Iterator[Prompt]:
        for start in range(0, len(uids), _CHUNK):
            yield from self.training.prompts_of(uids[start : start + _CHUNK])

    def _label_candidates(
        self, loaded: LoadedSource, prompts: Sequence[Prompt] | Iterator[Prompt]
    ) -> Iterator[Candidate]:
        for prompt in prompts:
            assert prompt.label is not None
            generation = self._generation(prompt.label, "stop", None)
            sample = RewardSample(prompt, 0, generation, prompt.label)
            yield Candidate(sample, loaded.place(int(prompt.uid.rpartition("/")[2])))

    def _response(self, place: str, row: dict[str, Any]) -> tuple[Candidate, bool]:
        uid, text = row["prompt_uid"], row["response"]
        held_out = uid in self._held_out
        try:
            prompt = self.training.prompts_of([uid])[0]
            held_out = False
        except ValueError:
            if not held_out:
                names = ", ".join(dict.fromkeys([*self._sources, *self._held_out_sources]))
                raise UserError(
                    f"{place}: there is no prompt {uid!r} in the job's data: it is SOURCE/ROW, of the sources {names}"
                ) from None
            prompt = self._held_out[uid]
        if row.get("prompt") not in (None, prompt.text):
            raise UserError(f"{place}: the prompt {uid!r} of the data is another one by now than the file's `prompt`")
        generation = self._generation(text, row.get("finish_reason") or "stop", row.get("response_tokens"))
        ordinal = row.get("ordinal")
        sample = RewardSample(prompt, row.get("sample") or 0, generation, text, ordinal)
        return Candidate(sample, place, row.get("reward") if row.get("reward_error") is None else None), held_out

    def _generation(self, text: str, finish: str, count: int | None) -> Generation:
        """A response as an engine gives it: tokenized, and of the number of tokens that was recorded."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        count = len(ids) + (finish == "stop") if count is None else count
        ids = [*ids[:count], *[end] * (count - len(ids))]
        return Generation(np.array(ids, dtype=np.int64), np.zeros(len(ids), np.float32), finish)


def _group(candidates: Sequence[Candidate]) -> Any:
    """Sorts a prompt's responses together, where its first one stands."""
    first: dict[tuple[int | None, str], int] = {}
    for candidate in candidates:
        first.setdefault(_key(candidate), len(first))
    return lambda candidate: first[_key(candidate)]


def _key(candidate: Candidate) -> tuple[int | None, str]:
    return candidate.sample.ordinal, candidate.sample.prompt.uid
