"""Rows of a source to prompts: chat template, tokens, label, reward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.rewards import BUILTIN_REWARDS
from rljob_api.spec import DataSource, RewardFunction, RewardSpec
from rljob_worker.data.chat import ChatTemplate
from rljob_worker.data.labels import label_text
from rljob_worker.data.pictures import PictureProcessor, RowPictures
from rljob_worker.data.places import text_with_places
from rljob_worker.data.prompts import check_prompt
from rljob_worker.data.reward_rows import RoutedRows, RowRewards, route
from rljob_worker.data.seeds import SEED
from rljob_worker.data.sources import LoadedSource
from rljob_worker.data.tokenizer import tokens_added_after
from rljob_worker.data.turns import Schema
from rljob_worker.errors import UserError
from rljob_worker.types import Picture, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("rljob.data")

_RENDERED = 100
"""Prompts of each source whose rendering is looked at before anything starts."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of one source whose responses a reward scores."""

    loaded: LoadedSource
    reward: RewardSpec
    count: int
    """Number of its rows that are used, from the first on."""
    left_out: frozenset[int] = frozenset()
    """Rows among them that are not used (`spec.data.skip`)."""
    routed: RoutedRows | None = None
    """The rows by value, where their reward follows from a column."""

    @classmethod
    def of(
        cls,
        loaded: LoadedSource,
        default_reward: RewardSpec | None,
        count: int | None = None,
        left_out: frozenset[int] = frozenset(),
    ) -> ScoredRows:
        """The first `count` rows, or all. Raises UserError where one of them has no reward."""
        reward = _reward_of(loaded, default_reward)
        rows = len(loaded.rows)
        count = min(rows, count or rows)
        return cls(loaded, reward, count, left_out, route(loaded, reward, count, left_out))


class Renderer:
    """Makes rows into prompts: chat template, tokens, label, reward.

    Args:
        loaded: the source.
        tokenizer: of the model.
        default_reward: of sources that have none.
        tools: schemas of the tools that the policy may call.
        max_pixels: of a picture; None: as many as the model's image processor leaves.
        left_out: rows whose prompts nobody uses (`spec.data.skip`): they may have pictures that cannot be read.
    """

    def __init__(
        self,
        loaded: LoadedSource,
        tokenizer: PreTrainedTokenizerBase,
        default_reward: RewardSpec | None,
        tools: Sequence[Schema] = (),
        max_pixels: int | None = None,
        left_out: frozenset[int] = frozenset(),
    ):
        self.loaded = loaded
        self._left_out = left_out
        self._pictures: PictureProcessor | None = None
        self._row_pictures = RowPictures(loaded)
        if loaded.image_key is not None:
            self._pictures = PictureProcessor(Path(tokenizer.name_or_path), tokenizer, max_pixels)
            self.loaded = self._row_pictures.checked(left_out)
        self._tokenizer = tokenizer
        self.reward = _reward_of(loaded, default_reward)
        self._rewards = RowRewards(self.reward)
        self._check_labels()
        self._chat: ChatTemplate | None = None
        if loaded.source.apply_chat_template:
            self._chat = ChatTemplate(loaded.source, loaded.field, tokenizer, loaded.template, tools)
        if self._chat is not None and loaded.source.seeds is None:
            key = loaded.source.prompt_key
            first = [(content[key], loaded.place(row)) for row, content in enumerate(loaded.rows[:_RENDERED])]
            for prompt, place in first:
                check_prompt(prompt, place, loaded.field, loaded.source)
            self._chat.check(first)
            self._chat.check_roles(loaded.facts.roles)
        if self._chat is None and loaded.facts.roles:
            logger.warning(
                "%s: the prompt (%r) is the JSON text of a list of chat messages, and is taken as it is written: set"
                " %s.applyChatTemplate: true for a prompt of the messages",
                next(iter(loaded.facts.roles.values())), loaded.source.prompt_key, loaded.field,
            )  # fmt: skip
        self._added = () if loaded.source.apply_chat_template else tokens_added_after(tokenizer)
        if self._added:
            logger.warning(
                "%s: the tokenizer ends every text with %s, which would end a prompt before its answer: left away",
                loaded.field, tokenizer.convert_ids_to_tokens(list(self._added)),
            )  # fmt: skip
        self._begin = tokenizer.bos_token_id

    def _check_labels(self) -> None:
        """Refuse an empty label where a built-in reward compares with it."""
        if self.reward.by is not None:
            # Which reward compares depends on the row: `route` looks at each.
            return
        blank = self.loaded.facts.blank_label
        parts: Sequence[RewardFunction] = self.reward.parts or [self.reward]
        compares = [part.name for part in parts if part.name is not None and BUILTIN_REWARDS[part.name].compares]
        if blank is not None and compares:
            source = self.loaded.source
            raise UserError(
                f"{blank}: the label ({source.label_key!r}, {self.loaded.field}.labelKey) is empty, and the reward "
                f"{compares[0]} compares with it"
            )

    def render(self, rows: Sequence[int]) -> list[Prompt]:
        """The prompts of these rows, tokenized as one batch; those of seeds have no tokens before a reset."""
        if not rows:
            return []
        source = self.loaded.source
        contents = [self.loaded.rows[row] for row in rows]
        if source.seeds is not None:
            return [
                replace(
                    self._prompt(row, content, "", (), source), environment=self.loaded.field, seed=int(content[SEED])
                )
                for row, content in zip(rows, contents)
            ]
        pictures = [self._pictures_of(row, content) for row, content in zip(rows, contents)]
        texts = [
            self._text(content[source.prompt_key], row, len(seen))
            for content, row, seen in zip(contents, rows, pictures)
        ]
        # A chat template writes the special tokens itself.
        encoded = self._tokenizer(texts, add_special_tokens=not source.apply_chat_template, return_attention_mask=False)
        prompts = []
        for row, content, text, token_ids, seen in zip(rows, contents, texts, encoded["input_ids"], pictures):
            token_ids = self._expanded(row, self._without_additions(token_ids), seen)
            if not token_ids:
                raise UserError(f"{self.loaded.place(row)}: the prompt has no tokens")
            prompt = self._prompt(row, content, text, tuple(token_ids), source)
            if seen:
                prompt = replace(prompt, pictures=seen)
            if source.environment is not None:
                prompt = replace(prompt, environment=self.loaded.field, seed=row, options=content)
            prompts.append(prompt)
        return prompts

    def _pictures_of(self, row: int, content: dict[str, Any]) -> tuple[Picture, ...]:
        if self._pictures is None:
            return ()
        try:
            return tuple(self._pictures.picture(image) for image in self._row_pictures.of(row, content))
        except ValueError as error:
            if row in self._left_out:
                return ()
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self.loaded.place(row)}: the image processor refuses its picture: {error}") from None

    def _expanded(self, row: int, ids: list[int], pictures: Sequence[Picture]) -> list[int]:
        if self._pictures is None or (row in self._left_out and not pictures):
            return ids
        try:
            return self._pictures.expanded(ids, pictures)
        except ValueError as error:
            raise UserError(f"{self.loaded.place(row)}: the row {error}") from None

    def _without_additions(self, ids: list[int]) -> list[int]:
        """Without the tokenizer's end tokens, and with one begin token where text and tokenizer brought one each."""
        if self._added and tuple(ids[-len(self._added) :]) == self._added:
            ids = ids[: -len(self._added)]
        return ids[1:] if self._begin is not None and ids[:2] == [self._begin, self._begin] else ids

    def _prompt(self, row: int, content: dict[str, Any], text: str, ids: tuple[int, ...], source: DataSource) -> Prompt:
        # Rewards get texts: a picture's bytes would go to each of their processes, for each sample.
        content = {name: value for name, value in content.items() if name != self.loaded.image_key}
        return Prompt(
            uid=f"{self.loaded.name}/{row}",
            source=self.loaded.name,
            text=text,
            token_ids=ids,
            label=None if source.label_key is None else label_text(content[source.label_key]),
            reward=self._reward(content, row),
            metadata={k: v for k, v in content.items() if k not in (source.prompt_key, source.label_key)},
            row=content,
            label_key=source.label_key,
            messages=None
            if self._chat is None or source.seeds is not None
            else self._chat.messages(content[source.prompt_key]),
        )

    def _reward(self, content: dict[str, Any], row: int) -> RewardSpec:
        try:
            return self._rewards.of_row(content)
        except ValueError as error:
            raise UserError(f"{self.loaded.place(row)}: {error}") from None

    def _text(self, prompt: Any, row: int, pictures: int) -> str:
        source, place = self.loaded.source, self.loaded.place(row)
        check_prompt(prompt, place, self.loaded.field, source)
        if self._chat is not None:
            return self._chat.render(prompt, place, pictures)
        try:
            return text_with_places(str(prompt), pictures)
        except ValueError as error:
            raise UserError(f"{place}: the row {error}") from None


def _reward_of(loaded: LoadedSource, default: RewardSpec | None) -> RewardSpec:
    reward = loaded.source.reward or default
    if reward is None:
        raise UserError(f"{loaded.field}.reward: neither this source nor spec.reward says how responses are scored")
    return reward
