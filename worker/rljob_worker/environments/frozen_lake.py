"""FrozenLake: walk over ice to the goal and around holes.

The task is that of gymnasium's FrozenLake-v1. Maps are our own, each drawn from the episode's seed alone: gymnasium's
random map is drawn when an environment is made, and a reset does not change it.
"""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import Annotated

from pydantic import Field

from rljob_worker.environments.base import BuiltInEnvironment
from rljob_worker.environments.boards import Board, BoardEnvironment, BoardSettings

_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Row and column of each action, in gymnasium's order."""
_TRIES = 10_000
_ICE, _HOLE, _GOAL = "_", "O", "G"
_STANDING = {_ICE: "P", _HOLE: "X", _GOAL: "V"}
_OUTSIDE = "#"


class View(StrEnum):
    """Part of the lake that is seen."""

    GRID = "Grid"
    """All of it."""
    NEAR = "Near"
    """Row and column, then the cells at the left, below, at the right and above."""


class LakeSettings(BoardSettings):
    """`args` of FrozenLake."""

    size: Annotated[int, Field(ge=2, le=16)] = 4
    """Rows and columns."""
    holes: Annotated[float, Field(ge=0, le=0.6)] = 0.2
    """Probability that a cell is a hole; maps without a way to the goal are drawn again."""
    slippery: bool = False
    """Whether a step goes to either side as often as ahead."""
    view: View = View.GRID
    """Part of the lake that is seen."""


class FrozenLake(BoardEnvironment):
    """Reward 1 at the goal, 0 in a hole, where the episode ends too."""

    names = ("Left", "Down", "Right", "Up")

    def __init__(self, settings: LakeSettings) -> None:
        self._lake = settings
        seen = (
            "You see the whole lake: P is you, _ is ice, O a hole, G the goal."
            if settings.view is View.GRID
            else "You see your row and column, then what is at your left, below, at your right and above: _ is ice, "
            "O a hole, G the goal, # the edge."
        )
        slips = " The ice is slippery: you may slide to either side." if settings.slippery else ""
        self.task = f"Walk over a frozen lake to the goal and do not fall into a hole. {seen}{slips}"
        super().__init__(settings)

    def make(self, seed: int) -> Lake:
        """The lake of an episode."""
        rng = Random(seed)
        return Lake(draw_map(rng, self._lake.size, self._lake.holes), self._lake, rng)


ENVIRONMENT = BuiltInEnvironment(LakeSettings, FrozenLake)


class Lake(Board):
    """A map with a walker on it, which starts at the top left; the goal is at the bottom right.

    Args:
        cells: rows of symbols.
        settings: of the task.
        rng: for where one slides.
    """

    def __init__(self, cells: list[str], settings: LakeSettings, rng: Random) -> None:
        self._cells, self._settings, self._rng = cells, settings, rng
        self._row = self._column = 0

    def text(self) -> str:
        """The observation, as `view` says."""
        if self._settings.view is View.NEAR:
            near = (self._cell(self._row + down, self._column + right) for down, right in _MOVES)
            return " ".join((f"r{self._row}", f"c{self._column}", *near))
        rows = [list(row) for row in self._cells]
        rows[self._row][self._column] = _STANDING[rows[self._row][self._column]]
        return "\n".join(" ".join(row) for row in rows)

    def move(self, action: int) -> float:
        """One step, which ends at the edge."""
        if self._settings.slippery:
            action = (action + int(self._rng.random() * 3) - 1) % len(_MOVES)
        down, right = _MOVES[action]
        last = len(self._cells) - 1
        self._row = min(max(self._row + down, 0), last)
        self._column = min(max(self._column + right, 0), last)
        here = self._cells[self._row][self._column]
        self.done, self.success = here != _ICE, here == _GOAL
        return float(self.success)

    def _cell(self, row: int, column: int) -> str:
        size = len(self._cells)
        return self._cells[row][column] if 0 <= row < size and 0 <= column < size else _OUTSIDE


def draw_map(rng: Random, size: int, holes: float) -> list[str]:
    """Rows of a lake on which there is a way to the goal.

    Raises:
        ValueError: after many draws there is none.
    """
    for _ in range(_TRIES):
        rows = [[_HOLE if rng.random() < holes else _ICE for _ in range(size)] for _ in range(size)]
        rows[0][0], rows[-1][-1] = _ICE, _GOAL
        if _has_way(rows):
            return ["".join(row) for row in rows]
    raise ValueError(f"no map of {size} x {size} with holes {holes:g} had a way to the goal in {_TRIES} draws")


def _has_way(rows: list[list[str]]) -> bool:
    seen, new = {(0, 0)}, [(0, 0)]
    while new:
        row, column = new.pop()
        for down, right in _MOVES:
            to = row + down, column + right
            if to in seen or not (0 <= to[0] < len(rows) and 0 <= to[1] < len(rows)) or rows[to[0]][to[1]] == _HOLE:
                continue
            seen.add(to)
            new.append(to)
    return (len(rows) - 1, len(rows) - 1) in seen
