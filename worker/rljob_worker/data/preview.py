"""The first row of each data source as the policy and the reward will see it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rljob_api import RLJobSpec
from rljob_api.safe_text import visible
from rljob_worker.data.dataset import PromptSource, Tools
from rljob_worker.data.renderer import ScoredRows
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer

_ENDS = 4
"""Tokens that are shown at each end of a prompt."""
_LONGEST = 600


@dataclass(frozen=True, slots=True)
class Preview:
    """A row as a job sees it."""

    uid: str
    text: str
    """The rendered prompt."""
    tokens: tuple[tuple[int, str], ...]
    """Number and text of each token of the prompt."""
    label: str | None

    def lines(self) -> Iterator[str]:
        """Lines of the display."""
        ends = (
            [*map(_token, self.tokens[:_ENDS]), "...", *map(_token, self.tokens[-_ENDS:])]
            if len(self.tokens) > 2 * _ENDS
            else [*map(_token, self.tokens)]
        )
        text = self.text if len(self.text) <= _LONGEST else f"{self.text[:_LONGEST]}... ({len(self.text)} characters)"
        yield f"first prompt {self.uid}, {len(self.tokens)} tokens: {' '.join(ends)}"
        yield from (f"  | {line}" for line in text.split("\n"))
        yield "  no label" if self.label is None else f"  label {self.label!r}"


def first_prompts(
    spec: RLJobSpec, longest: int, tools: Tools, spoken: Sequence[str]
) -> tuple[list[Preview], list[ScoredRows]]:
    """The first row of each source of the training data, rendered by the job's own tokenizer, and all of their rows.

    Args:
        spec: the job's.
        longest: tokens of the longest prompt that an engine has room for.
        tools: as of `PromptSource`.
        spoken: as of `prepare_tokenizer`.

    Raises:
        UserError: model, data or template cannot be used, as at a run's start.
    """
    with tempfile.TemporaryDirectory(prefix="rljob-validate-") as folder:
        tokenizer = load_tokenizer(prepare_tokenizer(spec, Path(folder), spoken))
        source = PromptSource(spec, tokenizer, max_prompt_tokens=longest, tools=tools)
        prompts = source.prompts_of([f"{name}/0" for name in source.rows])
        previews = [
            Preview(
                prompt.uid,
                prompt.text,
                tuple(zip(prompt.token_ids, map(str, tokenizer.convert_ids_to_tokens(list(prompt.token_ids))))),
                prompt.label,
            )
            for prompt in prompts
        ]
        return previews, source.scored()


def _token(token: tuple[int, str]) -> str:
    return f"{token[0]}={visible(token[1])!r}"
