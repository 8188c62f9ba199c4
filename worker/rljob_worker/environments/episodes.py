"""One episode's environment as the driver sees it: what it has answered, and what it is asked next. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rljob_worker.environments.base import Answer, Began, EnvironmentFailure, FailureKind, Reset, Step, Stepped


@dataclass(slots=True, eq=False)
class EpisodeEnvironment:
    """An environment that can be made anew by its seed and its actions, wherever it was lost."""

    key: int
    seed: int
    options: Mapping[str, object] = field(default_factory=dict)
    answers: list[Began | Stepped] = field(default_factory=list)
    """Answers of the reset and of each step."""
    actions: list[str] = field(default_factory=list)
    """Actions of the steps that were answered, and of one that is not yet."""
    position: int = 0
    """Number of the answers that its environment has given since it was made last."""
    cut: bool = False
    """Whether the newest action was cut at its longest."""
    losses: int = 0
    """Number of times that its host was lost while it was at work for this episode."""

    @property
    def waits(self) -> bool:
        """Whether an answer is wanted."""
        return len(self.answers) <= len(self.actions)

    @property
    def done(self) -> bool:
        """Whether it takes no further action."""
        last = self.answers[-1] if self.answers else None
        return isinstance(last, Stepped) and last.done

    def act(self, action: str, cut: bool = False) -> None:
        """Want the answer to an action; ValueError while another one is wanted, or after the end."""
        if self.waits:
            raise ValueError(f"environment of episode {self.key}: its answer is still awaited")
        if self.done:
            raise ValueError(f"environment of episode {self.key}: it has ended")
        self.actions.append(action)
        self.cut = cut

    def call(self) -> Reset | Step:
        """The next request to its environment: the reset, an action of before, or the one whose answer is wanted."""
        if self.position == 0:
            return Reset(self.seed, dict(self.options))
        return Step(self.actions[self.position - 1], self.cut and self.position == len(self.actions))

    def take(self, answer: Began | Stepped) -> Answer | None:
        """Take the answer to `call`; what is wanted, or None where it was one of before."""
        number = self.position
        self.position += 1
        if number == len(self.answers):
            self.answers.append(answer)
            return answer
        before = self.answers[number]
        if answer == before:
            return None
        what = "its reset" if number == 0 else f"step {number} ({self.actions[number - 1]!r})"
        return EnvironmentFailure(
            FailureKind.REPLAY,
            f"made anew with seed {self.seed} and the same actions, {what} gave something else: "
            f"{_differs(before, answer)}",
        )

    def lost(self) -> None:
        """Its environment is gone: what it had answered is asked for again."""
        self.position = 0


def _differs(before: Began | Stepped, now: Began | Stepped) -> str:
    for name in ("observation", "reward", "terminated", "truncated", "values"):
        old, new = getattr(before, name, None), getattr(now, name, None)
        if old != new:
            return f"{name} {_short(new)}, and {_short(old)} before"
    return f"{type(now).__name__} in the place of {type(before).__name__}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
