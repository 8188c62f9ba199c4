"""Turns of an episode: what an environment gave, and how much more may be said. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Finish(StrEnum):
    """Why an episode ended."""

    STOP = "stop"
    """An end token, a stop token or a stop string; where no environment answers."""
    LENGTH = "length"
    """The longest response allowed; with an environment, the longest stream."""
    ENVIRONMENT = "environment"
    """The environment ended it."""
    TURNS = "turns"
    """The most turns allowed."""
    FAILED = "failed"
    """The environment gave what is no answer."""


class TurnEnd(StrEnum):
    """Why an answer ended that an environment is to answer."""

    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"
    """The longest answer allowed: what closes it was not sampled."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Begin of an environment.

    Attributes:
        seed: of its reset.
        observation: the first, as it came; the stream's prompt was made of it.
        values: numbers that came with it.
    """

    seed: int
    observation: str
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer of the policy and what an environment gave for it.

    Attributes:
        action: the answer in words, as the environment got it.
        observation: as it came; nothing of the last one is in the stream.
        reward: of this step.
        done: whether no further step is possible.
        values: numbers that came with it.
        error: why the environment gave no answer; `reward` is then what such an episode gets in all.
        stream: number of the sample's stream that has the answer.
    """

    action: str
    observation: str
    reward: float
    done: bool
    values: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds on the length of an episode.

    Attributes:
        max_turns: answers.
        max_answer: tokens of one answer.
        max_tokens: of the whole stream, what was observed included.

    Raises:
        ValueError: one of them is below 1.
    """

    max_turns: int
    max_answer: int
    max_tokens: int

    def __post_init__(self) -> None:
        if min(self.max_turns, self.max_answer, self.max_tokens) < 1:
            raise ValueError(f"{self}: an episode has at least one answer of one token")

    def next(self, tokens: int, turns: int) -> int | Finish:
        """Tokens that the next answer may have, or why there is none.

        Args:
            tokens: of the stream, up to where the answer begins.
            turns: answers that the environment has answered.
        """
        if turns >= self.max_turns:
            return Finish.TURNS
        room = min(self.max_answer, self.max_tokens - tokens)
        return room if room > 0 else Finish.LENGTH


def total_reward(turns: Sequence[Turn]) -> float:
    """The reward of an episode: the sum of its steps', or that of an error."""
    last = turns[-1]
    return last.reward if last.error is not None else sum(turn.reward for turn in turns)
