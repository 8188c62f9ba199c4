"""Observations of an environment, as tokens of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rljob_worker.data.turns import OBSERVED_BY, TurnRenderer
from rljob_worker.environments.base import Answer, Began, Stepped
from rljob_worker.errors import UserError
from rljob_worker.flow.turns import Budget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


NO_TOKENS = (
    "of which the tokenizer makes no tokens: the first observation is a prompt, which needs one; return some text, or "
    "set applyChatTemplate"
)


class Observations:
    """Tokens of a first observation, and of one after an answer; longer ones are cut in the middle, and say so.

    Args:
        renderer: by the source's chat template.
        tokenizer: of the model.
        max_tokens: of an observation, without what the template writes around it.
        system: message before the first one; None: there is none.
    """

    def __init__(
        self, renderer: TurnRenderer, tokenizer: PreTrainedTokenizerBase, max_tokens: int, system: str | None = None
    ) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._max_tokens, self._system = max_tokens, system

    def first(self, observation: str) -> tuple[int, ...]:
        """A stream's prompt."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return self._renderer.first([*system, {"role": OBSERVED_BY, "content": self._cut(observation)}])

    def after(self, ended_by: int | None, observation: str, parts: Sequence[str] = ()) -> tuple[int, ...]:
        """Tokens appended after an answer.

        Args:
            ended_by: as of `TurnRenderer.after`.
            observation: the text.
            parts: the messages of which it consists, where those are several.
        """
        return self._renderer.after(ended_by, *map(self._cut, parts or [observation])).ids

    def conversation(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """A stream's prompt: all messages of an agent's call, each a role and a text.

        Raises:
            ValueError: the chat template takes no such conversation.
        """
        shown = [
            {"role": role, "content": self._renderer.special.broken(self._cut(text))[0]} for role, text in messages
        ]
        try:
            return self._renderer.first(shown)
        except Exception as error:
            roles = ", ".join(role for role, _ in messages)
            raise ValueError(
                f"the chat template takes no conversation of {roles}: {type(error).__name__}: {error}"
            ) from error

    def asked(self, ended_by: int | None, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Tokens appended after an answer for an agent's messages, all of which are the user's; ValueError as above."""
        try:
            return self._renderer.after(ended_by, *(self._cut(text) for _, text in messages)).ids
        except UserError as error:
            raise ValueError(str(error)) from error

    def too_long(self, text: str) -> int:
        """Tokens of a text that would be cut; 0: it would not."""
        return 0 if self._cut(text) == text else len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _cut(self, observation: str) -> str:
        """The text, or its beginning and end where it has too many tokens."""
        # A token has at least a byte.
        if len(observation.encode(errors="replace")) <= self._max_tokens:
            return observation
        ids = self._tokenizer(observation, add_special_tokens=False)["input_ids"]
        if len(ids) <= self._max_tokens:
            return observation
        head, tail = (self._max_tokens + 1) // 2, self._max_tokens // 2
        decode = self._tokenizer.decode
        return (
            f"{decode(ids[:head])} [... {len(ids) - head - tail} tokens left out ...] {decode(ids[len(ids) - tail :])}"
        )


def check_room(field: str, observations: Observations, budget: Budget, answers: Sequence[Answer]) -> None:
    """Refuse what leaves no room for a first answer, or for a second one where there may be one.

    Args:
        field: place in the manifest of the source.
        observations: its texts as tokens.
        budget: of its episodes.
        answers: of an episode: its reset, and its steps.

    Raises:
        UserError: with both numbers, and what would be right.
    """
    began, *steps = answers
    assert isinstance(began, Began)
    first = len(observations.first(began.observation))
    if first == 0:
        raise UserError(f"{field}.environment: its reset returned {began.observation!r}, {NO_TOKENS}")
    found = f"spec.episodes.maxTokens: {budget.max_tokens}, and {field}.environment begins with {first} tokens"
    if first + budget.max_answer > budget.max_tokens:
        raise UserError(
            f"{found}, which leaves no room for an answer of {budget.max_answer}; allowed: {first + budget.max_answer} "
            "or more, or a smaller episodes.maxObservationTokens"
        )
    if not steps or not isinstance(steps[0], Stepped) or steps[0].done or budget.max_turns == 1:
        return
    observed = len(observations.after(None, steps[0].observation))
    # The shortest answer is one token.
    if first + 1 + observed >= budget.max_tokens:
        raise UserError(
            f"{found} and answers with {observed}, which leaves no room for a second turn of {budget.max_turns}; "
            f"allowed: more than {first + 1 + observed}, a smaller episodes.maxObservationTokens, or one turn"
        )
