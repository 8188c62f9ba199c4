"""Answers as what they are: a value with a unit, a tuple, a set, a matrix, an equation, a word."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_worker.rewards.answers.expression import Node
from rljob_worker.rewards.answers.units import Unit


@dataclass(frozen=True, slots=True)
class Words:
    """Text that is no mathematics, or none that is read."""

    text: str


@dataclass(frozen=True, slots=True)
class Value:
    """An expression, with what stands behind it."""

    node: Node
    unit: Unit | None = None
    percent: bool = False
    degrees: bool = False
    compound: bool = False
    """Whether it is of several numbers with units, such as 3 h 20 min."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """A tuple, an interval or a list, with its brackets."""

    opening: str
    items: tuple[Answer, ...]
    closing: str


@dataclass(frozen=True, slots=True)
class Unordered:
    """Several answers: a set, or a list without brackets. `joint`: the word between them, and, or, or a comma."""

    items: tuple[Answer, ...]
    braces: bool
    joint: str = ","


@dataclass(frozen=True, slots=True)
class Union:
    """Sets joined by a cup."""

    items: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Without:
    """A set less another one."""

    whole: Answer
    less: Answer


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of items."""

    rows: tuple[tuple[Answer, ...], ...]
    determinant: bool


@dataclass(frozen=True, slots=True)
class Assigned:
    """A name with its value: `x = 7`."""

    name: str
    to: Answer


@dataclass(frozen=True, slots=True)
class Relation:
    """Expressions with relations between them: `=`, `<`, `\\le`, `\\ne`."""

    sides: tuple[Node, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Numeral:
    """Digits in a base."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """Numbers with colons between them, a clock's time among them."""

    items: tuple[Answer, ...]


Answer = Words | Value | Ordered | Unordered | Union | Without | Matrix | Assigned | Relation | Numeral | Ratio
