"""Messages of a turn to the tokens that are appended to a stream, by a chat template. Pure but for the template.

A conversation is never rendered a second time: templates rewrite what was said before (they drop thinking, trim text),
and tokens that were sampled are what they are. What a turn appends is found as a difference: behind a sentinel in the
place of an answer stand the answer's close, the new messages, and the opening of the next answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rljob_worker.data.bounded import within_bounds
from rljob_worker.data.special_texts import SpecialTexts
from rljob_worker.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
Schema = Mapping[str, Any]
"""A tool as chat templates take it: `{"type": "function", "function": {name, description, parameters}}`."""
Render = Callable[[Sequence[Message], bool], str]
"""A conversation as text, with the opening of the next answer or without."""
OBSERVED_BY, TOOL = "user", "tool"
"""The roles in which an environment and tools speak."""
_SENTINEL, _OTHER_SENTINEL = "Zqxv", "Wjkp"
_SHOWN = 80
_KEPT = 1024
"""Newest observations whose tokens are kept: games say the same in many places and samples."""
_LONG = 2000
"""Characters of those that are not: long texts are seldom said twice."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens appended to a stream after an answer."""

    ids: tuple[int, ...]
    broken: int
    """Texts of special tokens in the observation that were kept from becoming those."""


class TurnRenderer:
    """Tokens of the first prompt, and of each observation after an answer.

    Args:
        render: by the chat template.
        tokenizer: of the model.
        stops: tokens that end an answer.
        where: the template in words, which begins a message.
        role: of the messages after an answer.

    Raises:
        UserError: the template drops answers, what it appends depends on what was said before, or it closes an answer
            with none of the stop tokens.
    """

    def __init__(
        self,
        render: Render,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[int],
        where: str,
        role: str = OBSERVED_BY,
    ) -> None:
        self._render, self._tokenizer, self._where, self._role = render, tokenizer, where, role
        self._histories = [_in_role(history, role) for history in _HISTORIES]
        self._stops = {int(stop): str(tokenizer.convert_ids_to_tokens(int(stop))) for stop in stops}
        self.special = SpecialTexts(tokenizer)
        """Texts that observations must not have as they are."""
        # Rendering and tokenizing take 70 us of the one thread that asks the engines.
        self._kept = lru_cache(_KEPT)(self._delta)
        self._check_history()
        self.closing = self._closing()
        """The stop token that closes an answer; None where the template closes answers with nothing."""

    def first(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Tokens of a conversation before the first answer; what the manifest's system message has is meant so."""
        shown = [
            one if one["role"] == "system" else {**one, "content": self.special.broken(one["content"])[0]}
            for one in messages
        ]
        return self._encoded(self._render(shown, True))

    def after(self, ended_by: int | None, *observed: str) -> Delta:
        """Tokens that an observation appends after an answer.

        Args:
            ended_by: the stop token that ended the answer, and is its last one; None where it was cut. What closes an
                answer is appended unless that token is what closes it.
            observed: the environment's text, or the messages of several tools.
        """
        if sum(map(len, observed)) > _LONG:
            return self._delta(ended_by, observed)
        return self._kept(ended_by, observed)

    def _delta(self, ended_by: int | None, observed: tuple[str, ...]) -> Delta:
        texts = [self.special.broken(one) for one in observed]
        tail = self._tail(self._histories[0], [text for text, _ in texts], _SENTINEL)
        end = None if ended_by is None else self._stops.get(ended_by)
        if end is not None and tail.lstrip().startswith(end):
            tail = tail.lstrip()[len(end) :]
        return Delta(self._encoded(tail), sum(broken for _, broken in texts))

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _tail(self, before: Sequence[Message], observed: Sequence[str], sentinel: str) -> str:
        """The text behind an answer, up to the opening of the next one."""
        new = [_message("assistant", sentinel), *(_message(self._role, one) for one in observed)]
        try:
            whole = self._render([*before, *new], True)
        except Exception as error:
            raise UserError(
                f"{self._where}: takes no turn of {self._role} after an answer: {type(error).__name__}: {error}"
            ) from None
        if sentinel not in whole:
            raise UserError(f"{self._where}: drops what the assistant said before")
        return whole[whole.rindex(sentinel) + len(sentinel) :]

    def _check_history(self) -> None:
        histories, said = self._histories, ["result of it"]
        first = self._tail(histories[0], said, _SENTINEL)
        if said[0] not in first:
            raise UserError(f"{self._where}: drops what {self._role} says after an answer")
        tried = [(history, _SENTINEL) for history in histories[1:]] + [(histories[0], _OTHER_SENTINEL)]
        for history, sentinel in tried:
            try:
                tail = self._tail(history, said, sentinel)
            except UserError:
                if history[0]["role"] == "system":
                    # It takes no system message, and will be given none.
                    continue
                raise
            if tail != first:
                raise UserError(
                    f"{self._where}: what a turn appends depends on what was said before: {_short(first)} after one "
                    f"message, and {_short(tail)} after {len(history)}; a stream of tokens is only appended to"
                )

    def _closing(self) -> int | None:
        """The token that closes an answer; UserError where it is one at which no answer ends."""
        try:
            whole = self._render([*self._histories[0], _message("assistant", _SENTINEL)], False)
        except Exception:
            # It renders no conversation that ends with an answer.
            whole = _SENTINEL
        close = whole[whole.rindex(_SENTINEL) + len(_SENTINEL) :].strip() if _SENTINEL in whole else ""
        closing = [stop for stop, text in self._stops.items() if close.startswith(text)]
        if close and not closing:
            raise UserError(
                f"{self._where}: closes an answer with {_short(close)}, which begins with none of the tokens that end "
                f"one ({', '.join(self._stops.values())}): answers would go on to their longest; add it to the "
                "generation config's eos_token_id"
            )
        return closing[0] if closing else None


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


_HISTORIES: tuple[tuple[Message, ...], ...] = (
    (_message("user", "q"),),
    (_message("system", "be kind"), _message("user", "q")),
    (_message("user", "q"), _message("assistant", "one"), _message("user", "two")),
    (
        _message("user", "q"),
        _message("assistant", "one"),
        _message("user", "two"),
        _message("assistant", "three"),
        _message("user", "four"),
    ),
)


def _in_role(history: Sequence[Message], role: str) -> tuple[Message, ...]:
    """A history in which what comes after an answer is said in that role."""
    answered = False
    found = []
    for message in history:
        found.append(_message(role, message["content"]) if answered and message["role"] == "user" else message)
        answered = message["role"] == "assistant"
    return tuple(found)


def template_of(tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> Render:
    """Renders by a tokenizer's chat template, or by another one."""

    def render(messages: Sequence[Message], opened: bool) -> str:
        conversation = [dict(message) for message in messages]
        return within_bounds(
            lambda: tokenizer.apply_chat_template(
                conversation, chat_template=template, add_generation_prompt=opened, tokenize=False
            )
        )

    return render


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")
