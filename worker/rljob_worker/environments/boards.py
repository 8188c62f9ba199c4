"""Environments on a board of cells, shown as text, with a few named actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from rljob_api.base import ApiModel, FiniteFloat
from rljob_api.environments import Form
from rljob_worker.environments.answers import Actions


class BoardSettings(ApiModel):
    """Settings in `args` of all of them."""

    form: Form = Form.PLAIN
    """Form in which the policy writes its action."""
    instructions: bool = True
    """Whether the first observation says what to do and how to answer; without, observations are the board alone."""
    format_penalty: Annotated[FiniteFloat, Field(le=0)] = -0.1
    """Reward of an answer that is no action."""


class Board(ABC):
    """One episode's board: it changes by actions, and by nothing else."""

    done = False
    success = False

    @abstractmethod
    def text(self) -> str:
        """The board as the policy sees it: cells with a blank between them, rows in lines of their own."""

    @abstractmethod
    def move(self, action: int) -> float:
        """Do an action; its reward."""


class BoardEnvironment(ABC):
    """A board behind text: `base.TextEnvironment`.

    An answer that is no action leaves the board as it is, costs `formatPenalty`, and the observation says so.
    """

    names: tuple[str, ...]
    """Names of the actions."""
    task: str
    """The task, and the meaning of the symbols."""

    def __init__(self, settings: BoardSettings) -> None:
        self._settings = settings
        self._actions = Actions(self.names, settings.form)
        self._board: Board | None = None

    @abstractmethod
    def make(self, seed: int) -> Board:
        """The board of an episode."""

    def reset(self, *, seed: int, options: Mapping[str, object]) -> tuple[str, dict[str, float]]:
        """Begin an episode: instructions and board."""
        del options
        self._board = self.make(seed)
        text = self._board.text()
        return (f"{self.task} {self._actions.told()}\n\n{text}" if self._settings.instructions else text), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, float]]:
        """Move, where the answer is an action; `info` has `valid` and `success`."""
        board = self._board
        assert board is not None, "step before reset"
        number = self._actions.number(action)
        if number is None:
            reward, text = self._settings.format_penalty, board.text()
            if self._settings.instructions:
                text = f"That was no action. {self._actions.told()}\n\n{text}"
        else:
            reward, text = board.move(number), board.text()
        return text, reward, board.done, False, {"valid": float(number is not None), "success": float(board.success)}

    def close(self) -> None:
        """Give the board up."""
        self._board = None

    def examples(self) -> list[str]:
        """An answer for each action."""
        return [self._actions.written(number) for number in range(len(self.names))]
