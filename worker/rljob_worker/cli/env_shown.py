"""Output of `rljob env` for an episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rljob_api.how_many import how_many
from rljob_api.json_types import Json, JsonObject

if TYPE_CHECKING:
    from rljob_worker.cli.env_tokens import EpisodeTokens, TurnTokens
    from rljob_worker.environments.base import Began, Stepped


@dataclass(frozen=True, slots=True)
class Turn:
    """An action and what came of it."""

    action: str
    answer: Stepped
    tokens: TurnTokens | None
    """None without a tokenizer."""

    def as_json(self) -> JsonObject:
        """It as a JSON value."""
        shown: dict[str, Json] = {
            "action": self.action,
            "observation": self.answer.observation,
            "reward": self.answer.reward,
            "terminated": self.answer.terminated,
            "truncated": self.answer.truncated,
            "values": dict(self.answer.values),
        }
        if self.tokens is not None:
            shown |= {"sampled_tokens": list(self.tokens.sampled), "observed_tokens": list(self.tokens.observed)}
        return shown


@dataclass(slots=True)
class Played:
    """An episode as it was played."""

    title: str
    seed: int
    began: Began | None = None
    prompt_tokens: tuple[int, ...] | None = None
    turns: list[Turn] = field(default_factory=list)
    failure: str | None = None

    @property
    def reward(self) -> float:
        """Sum of the rewards of all steps."""
        return sum(turn.answer.reward for turn in self.turns)

    @property
    def done(self) -> bool:
        """Whether the environment ended it."""
        return bool(self.turns) and self.turns[-1].answer.done

    def as_json(self) -> JsonObject:
        """It as a JSON value."""
        tokens: JsonObject = {} if self.prompt_tokens is None else {"prompt_tokens": list(self.prompt_tokens)}
        return {
            "environment": self.title,
            "seed": self.seed,
            "observation": None if self.began is None else self.began.observation,
            **tokens,
            "steps": [turn.as_json() for turn in self.turns],
            "reward": self.reward,
            "done": self.done,
            "failure": self.failure,
        }


class Silent:
    """Shows nothing."""

    def began(self, played: Played, answer: Began) -> None:
        """Show the first observation."""

    def stepped(self, played: Played) -> None:
        """Show the last turn."""

    def end(self, played: Played) -> None:
        """Show how it ended."""


class Text(Silent):
    """Shows what strangers wrote with what a terminal would obey escaped.

    Args:
        tokens: which makes tokens text.
    """

    def __init__(self, tokens: EpisodeTokens | None) -> None:
        self._tokens = tokens

    def began(self, played: Played, answer: Began) -> None:
        """Show the first observation."""
        from rljob_api.safe_text import visible_line

        print(visible_line(f"{played.title}, seed {played.seed}"))
        _show(answer.observation)
        if played.prompt_tokens is not None:
            self._show_tokens("prompt", played.prompt_tokens)

    def stepped(self, played: Played) -> None:
        """Show the last turn."""
        from rljob_api.safe_text import visible_line

        turn, number = played.turns[-1], len(played.turns)
        numbers = "".join(f"  {name} {value:g}" for name, value in turn.answer.values.items())
        print(visible_line(f"step {number}: {turn.action}  ->  reward {turn.answer.reward:g}{numbers}"))
        _show(turn.answer.observation)
        if turn.tokens is not None:
            self._show_tokens("sampled", turn.tokens.sampled)
            self._show_tokens("observed", turn.tokens.observed, turn.tokens.broken)

    def end(self, played: Played) -> None:
        """Show how it ended."""
        from rljob_api.safe_text import visible

        if played.failure:
            print(visible(f"failed: {played.failure}"))
        else:
            how = "ended" if played.done else "not ended"
            print(f"{how} after {how_many(len(played.turns), 'step')}: reward {played.reward:g}")

    def _show_tokens(self, what: str, ids: Sequence[int], broken: int = 0) -> None:
        from rljob_api.safe_text import visible_line

        if self._tokens is None or not ids:
            return
        kept = f" ({broken} texts of special tokens kept from becoming those)" if broken else ""
        print(visible_line(f"  {what}: {len(ids)} tokens, {self._tokens.text(ids)!r}{kept}"))


def _show(observation: str) -> None:
    from rljob_api.safe_text import visible_block

    print("  " + visible_block(observation, "  "), flush=True)
