"""The tokens that an episode of `rljob env` would have in a job's stream."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rljob_worker.data.tokenizer import TOKENIZER_FILES
from rljob_worker.errors import UserError, no_folder


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Tokens that one turn adds to a stream."""

    sampled: tuple[int, ...]
    """The action's, as a policy would write it, and the end token."""
    observed: tuple[int, ...]
    """Appended after it, up to where the next answer begins; empty after the last one."""
    broken: int
    """Texts of special tokens in the observation that were kept from becoming those."""


class EpisodeTokens:
    """Tokens of an episode's turns, by the tokenizer and chat template of a model.

    Args:
        folder: with the tokenizer's files, and `generation_config.json` where there is one.

    Raises:
        UserError: there is no tokenizer or chat template, or a stream cannot follow the template.
    """

    def __init__(self, folder: Path) -> None:
        from rljob_api.profiles.base import BACKEND_AUTOLOAD_VARIABLE

        if not folder.is_dir():
            raise UserError(f"--tokenizer: {no_folder(folder)}; a model's folder is needed")
        if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
            raise UserError(f"--tokenizer: {folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
        # transformers imports torch, which would ask for a device that is not used.
        os.environ[BACKEND_AUTOLOAD_VARIABLE] = "0"
        from rljob_worker.data.tokenizer import load_tokenizer
        from rljob_worker.data.turns import TurnRenderer, template_of
        from rljob_worker.models.generation_config import end_tokens

        try:
            self._tokenizer = load_tokenizer(folder)
        except UserError as error:
            raise UserError(f"--tokenizer: {str(error).removeprefix('spec.model: ')}") from None
        if not self._tokenizer.chat_template:
            raise UserError(f"--tokenizer: the tokenizer in {folder} has no chat template")
        stops = [int(self._tokenizer.eos_token_id), *end_tokens(folder)]
        where = f"--tokenizer: the chat template in {folder}"
        self.turns = TurnRenderer(template_of(self._tokenizer), self._tokenizer, stops, where)
        """Has the prompt's, which end where the first answer begins."""
        self._end = stops[0] if self.turns.closing is None else self.turns.closing

    def turn(self, action: str, observation: str | None) -> TurnTokens:
        """A turn's; without an observation it is the last one."""
        sampled = (*self._tokenizer(action, add_special_tokens=False)["input_ids"], self._end)
        if observation is None:
            return TurnTokens(sampled, (), 0)
        delta = self.turns.after(self._end, observation)
        return TurnTokens(sampled, delta.ids, delta.broken)

    def text(self, ids: Sequence[int]) -> str:
        """Tokens as text, those that are special too."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
