"""Sets of real numbers: intervals, unions, inequalities."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_worker.rewards.answers import values
from rljob_worker.rewards.answers.expression import Node
from rljob_worker.rewards.answers.forms import (
    Answer,
    Assigned,
    Ordered,
    Relation,
    Union,
    Unordered,
    Value,
    Without,
    Words,
)
from rljob_worker.rewards.answers.values import Budget, NoValueError, Number

Interval = tuple[Number, bool, Number, bool]
"""Start, whether it belongs to the set, end, whether that does."""


def reals(answer: Answer, budget: Budget) -> list[Interval] | None:
    """A set of real numbers as disjoint intervals; None for what is none."""
    try:
        found = _intervals(answer, budget)
    except NoValueError:
        return None
    return None if found is None else _merged(found)


def _intervals(answer: Answer, budget: Budget) -> list[Interval] | None:
    everything = [(-values.INFINITY, False, values.INFINITY, False)]
    if isinstance(answer, Words):
        return {"all real numbers": everything, "no solution": []}.get(answer.text)
    if isinstance(answer, Ordered):
        return _interval(answer, budget)
    if isinstance(answer, Relation):
        return _within(answer, budget) or _solutions(answer, budget)
    if isinstance(answer, Without):
        whole, less = _intervals(answer.whole, budget), _intervals(answer.less, budget)
        return None if whole is None or less is None else _intersection(whole, _complement(less))
    if isinstance(answer, Union):
        parts = [_intervals(item, budget) for item in answer.items]
        return None if any(part is None for part in parts) else [one for part in parts for one in part or ()]
    if isinstance(answer, Unordered):
        return _of_list(answer, budget)
    return None


def _of_list(answer: Unordered, budget: Budget) -> list[Interval] | None:
    if answer.braces:
        points = [values.real(item.node, budget) for item in answer.items if isinstance(item, Value)]
        return [(point, True, point, True) for point in points] if len(points) == len(answer.items) else None
    parts = [_point(item, budget) if answer.joint == "or" else _intervals(item, budget) for item in answer.items]
    if (
        any(part is None for part in parts)
        or len({item.name for item in answer.items if isinstance(item, Assigned)}) > 1
    ):
        return None
    if answer.joint == "or" or not all(isinstance(item, Relation) for item in answer.items):
        return [one for part in parts for one in part or ()]
    found = [(-values.INFINITY, False, values.INFINITY, False)]
    for part in parts:
        found = _intersection(found, part or [])
    if not found and answer.joint == ",":
        return [one for part in parts for one in part or ()]
    return found


def _point(item: Answer, budget: Budget) -> list[Interval] | None:
    """`x = 1` beside inequalities."""
    if not isinstance(item, Assigned) or not isinstance(item.to, Value):
        return _intervals(item, budget)
    at = values.real(item.to.node, budget)
    return [(at, True, at, True)]


def _interval(answer: Ordered, budget: Budget) -> list[Interval] | None:
    if len(answer.items) != 2 or answer.opening == r"\langle":
        return None
    ends = [values.real(item.node, budget) for item in answer.items if isinstance(item, Value) and item.unit is None]
    if len(ends) != 2 or not ends[0] < ends[1]:
        return None
    return [(ends[0], answer.opening == "[", ends[1], answer.closing == "]")]


def _solutions(relation: Relation, budget: Budget) -> list[Interval] | None:
    """Solutions of inequalities between one variable and numbers."""
    names = [side.name for side in relation.sides if side.kind == "symbol"]
    if len(names) != 1 or sum(bool(side.symbols()) for side in relation.sides) != 1:
        return None
    found = [(-values.INFINITY, False, values.INFINITY, False)]
    at = next(index for index, side in enumerate(relation.sides) if side.kind == "symbol")
    for index, sign in enumerate(relation.signs):
        if index not in (at - 1, at):
            return None
        bound = values.real(relation.sides[index if index < at else index + 1], budget)
        if sign == r"\ne":
            found = _intersection(found, _complement([(bound, True, bound, True)]))
            continue
        if sign not in ("<", ">", r"\le", r"\ge"):
            return None
        is_lower = (sign in ("<", r"\le")) == (index < at)
        closed = sign in (r"\le", r"\ge")
        below, above = (-values.INFINITY, False), (values.INFINITY, False)
        part = (bound, closed, *above) if is_lower else (*below, bound, closed)
        found = _intersection(found, [part])
    return found


def _within(relation: Relation, budget: Budget) -> list[Interval] | None:
    """Solutions of `|x - a| < r` and of `|x - a| > r`, for a positive r."""
    at = next((index for index, side in enumerate(relation.sides) if side.kind == "abs"), None)
    if at is None or len(relation.signs) != 1 or relation.signs[0] not in ("<", ">", r"\le", r"\ge"):
        return None
    inner, other = relation.sides[at].parts[0], relation.sides[1 - at]
    terms = inner.parts if inner.kind == "add" else (inner,)
    shift = [term for term in terms if term.kind != "symbol"]
    if len(terms) - len(shift) != 1 or other.symbols() or any(term.symbols() for term in shift):
        return None
    center = -values.real(Node("add", tuple(shift)), budget) if shift else 0
    radius = values.real(other, budget)
    if radius <= 0:
        return None
    is_inside = (relation.signs[0] in ("<", r"\le")) == (at == 0)
    closed = (relation.signs[0] in (r"\le", r"\ge")) == is_inside
    inside = [(center - radius, closed, center + radius, closed)]
    return inside if is_inside else _complement(inside)


def _intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    found = []
    for a in one:
        for b in other:
            start, start_in = max((a[0], not a[1]), (b[0], not b[1]))
            end, end_in = min((a[2], a[3]), (b[2], b[3]))
            if start < end or (start == end and not start_in and end_in):
                found.append((start, not start_in, end, end_in))
    return found


def _complement(intervals: Sequence[Interval]) -> list[Interval]:
    found: list[Interval] = [(-values.INFINITY, False, values.INFINITY, False)]
    for start, start_in, end, end_in in intervals:
        outside = [(-values.INFINITY, False, start, not start_in), (end, not end_in, values.INFINITY, False)]
        found = _intersection(found, outside)
    return found


def _merged(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for interval in sorted(intervals, key=lambda one: (one[0], not one[1])):
        if merged:
            start, start_in, end, end_in = merged[-1]
            if interval[0] < end or (interval[0] == end and (end_in or interval[1])):
                last = max((end, end_in), (interval[2], interval[3]))
                merged[-1] = (start, start_in, *last)
                continue
        merged.append(interval)
    return merged


def same_sets(one: Sequence[Interval], other: Sequence[Interval]) -> bool:
    """Whether two results of `reals` are the same set."""
    return len(one) == len(other) and all(
        a[1] == b[1] and a[3] == b[3] and values.same_reals(a[0], b[0]) and values.same_reals(a[2], b[2])
        for a, b in zip(one, other, strict=True)
    )
