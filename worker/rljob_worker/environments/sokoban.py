"""Sokoban: push all boxes onto targets.

Boards are drawn by reverse play: from the solved board, boxes are pulled away by random moves, so that pushing them
back is possible. Rewards are those of gym-sokoban: -0.1 a step, 1 for a box that comes onto a target, -1 for one that
leaves it, 10 for the last one.
"""

from __future__ import annotations

from random import Random
from typing import Annotated, Self, TypeVar

from pydantic import Field, model_validator

from rljob_api.base import ApiModel, FiniteFloat
from rljob_worker.environments.base import BuiltInEnvironment
from rljob_worker.environments.boards import Board, BoardEnvironment, BoardSettings

Cell = tuple[int, int]
T = TypeVar("T")
_MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""Row and column of each action: Up, Down, Left, Right."""
_TRIES = 1000
_PULL = 0.7
"""Probability that a box comes along where it can."""
Side = Annotated[int, Field(ge=5, le=20)]
Symbol = Annotated[str, Field(pattern=r"^\S{1,16}$")]


class Grid(ApiModel):
    """The symbol of each kind of cell; all different."""

    wall: Symbol = "#"
    empty: Symbol = "_"
    target: Symbol = "O"
    box_on_target: Symbol = "√"
    box: Symbol = "X"
    player: Symbol = "P"
    player_on_target: Symbol = "S"

    @model_validator(mode="after")
    def _differ(self) -> Self:
        symbols = [getattr(self, name) for name in type(self).model_fields]
        if len(set(symbols)) < len(symbols):
            raise ValueError(f"symbols must differ: {' '.join(symbols)}")
        return self


class SokobanSettings(BoardSettings):
    """`args` of Sokoban."""

    size: tuple[Side, Side] = (6, 6)
    """Rows and columns, walls around them included."""
    boxes: Annotated[int, Field(ge=1, le=8)] = 1
    pulls: Annotated[int, Field(ge=1, le=1000)] = 30
    """Moves of the reverse play: more of them take boxes further away."""
    grid: Grid = Grid()
    """The symbols."""
    step_reward: FiniteFloat = -0.1
    """Reward of each move."""
    box_reward: FiniteFloat = 1.0
    """Reward of a box that comes onto a target; one that leaves it costs as much."""
    solved_reward: FiniteFloat = 10.0
    """Reward of the last box, beside its own."""


class Sokoban(BoardEnvironment):
    """Ends when all boxes are on targets."""

    names = ("Up", "Down", "Left", "Right")

    def __init__(self, settings: SokobanSettings) -> None:
        self._own = settings
        grid = settings.grid
        self.task = (
            "Push all boxes onto targets; boxes cannot be pulled. "
            f"{grid.player} is you, {grid.box} a box, {grid.target} a target, {grid.box_on_target} a box on a target, "
            f"{grid.player_on_target} you on a target, {grid.wall} a wall, {grid.empty} floor."
        )
        super().__init__(settings)

    def make(self, seed: int) -> Room:
        """The board of an episode."""
        return draw_room(Random(seed), self._own)


ENVIRONMENT = BuiltInEnvironment(SokobanSettings, Sokoban)


class Room(Board):
    """Walls, targets, boxes and a player.

    Args:
        floor: cells that are no wall, targets among them.
        targets: as many as boxes.
        boxes: where they are.
        player: where it is.
        settings: of the task.
    """

    def __init__(
        self, floor: set[Cell], targets: set[Cell], boxes: set[Cell], player: Cell, settings: SokobanSettings
    ) -> None:
        self.floor, self.targets, self.boxes, self.player = floor, targets, boxes, player
        self._settings = settings

    def text(self) -> str:
        """The whole board."""
        rows, columns = self._settings.size
        return "\n".join(" ".join(self._symbol((row, column)) for column in range(columns)) for row in range(rows))

    def move(self, action: int) -> float:
        """One move: to a free cell, or to one whose box moves on; else nobody moves."""
        down, right = _MOVES[action]
        to = self.player[0] + down, self.player[1] + right
        beyond = to[0] + down, to[1] + right
        before = len(self.boxes & self.targets)
        if to in self.boxes and beyond in self.floor - self.boxes:
            self.boxes = self.boxes - {to} | {beyond}
        if to in self.floor - self.boxes:
            self.player = to
        after = len(self.boxes & self.targets)
        self.done = self.success = self.boxes == self.targets
        own = self._settings
        return own.step_reward + own.box_reward * (after - before) + own.solved_reward * self.done

    def _symbol(self, cell: Cell) -> str:
        grid, on_target = self._settings.grid, cell in self.targets
        if cell not in self.floor:
            return grid.wall
        if cell in self.boxes:
            return grid.box_on_target if on_target else grid.box
        if cell == self.player:
            return grid.player_on_target if on_target else grid.player
        return grid.target if on_target else grid.empty


def draw_room(rng: Random, settings: SokobanSettings) -> Room:
    """A board that can be solved and is not.

    Raises:
        ValueError: many draws gave none: there is no room for so many boxes.
    """
    for _ in range(_TRIES):
        floor = _carved(rng, *settings.size)
        free = sorted(floor)
        if len(free) < 2 * settings.boxes + 1:
            continue
        targets = {_taken(rng, free) for _ in range(settings.boxes)}
        found = _pulled(rng, floor, targets, _taken(rng, free), settings.pulls)
        if found is not None:
            return Room(floor, targets, *found, settings)
    rows, columns = settings.size
    raise ValueError(f"no board of {rows} x {columns} with {settings.boxes} boxes came of {_TRIES} draws")


def _carved(rng: Random, rows: int, columns: int) -> set[Cell]:
    """The floor that a random walk within the outer walls leaves behind."""
    at = 1 + int(rng.random() * (rows - 2)), 1 + int(rng.random() * (columns - 2))
    floor = {at}
    for _ in range(4 * (rows - 2) * (columns - 2)):
        down, right = _MOVES[int(rng.random() * len(_MOVES))]
        at = min(max(at[0] + down, 1), rows - 2), min(max(at[1] + right, 1), columns - 2)
        floor.add(at)
    return floor


def _pulled(
    rng: Random, floor: set[Cell], targets: set[Cell], player: Cell, pulls: int
) -> tuple[set[Cell], Cell] | None:
    """Boxes and player of the reverse play's state with most boxes off their targets, the farthest first; None where
    no box could be pulled."""
    boxes, best, found = set(targets), (0, 0), None
    for _ in range(pulls):
        down, right = _MOVES[int(rng.random() * len(_MOVES))]
        come = rng.random() < _PULL
        to = player[0] + down, player[1] + right
        if to not in floor or to in boxes:
            continue
        behind = player[0] - down, player[1] - right
        if come and behind in boxes:
            boxes = boxes - {behind} | {player}
        player = to
        off = boxes - targets
        far = sum(min(abs(box[0] - row) + abs(box[1] - column) for row, column in targets) for box in off)
        if (len(off), far) > best:
            best, found = (len(off), far), (boxes, player)
    return found


def _taken(rng: Random, cells: list[T]) -> T:
    return cells.pop(int(rng.random() * len(cells)))
