"""Whether two readings are the same answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from rljob_worker.rewards.answers import values
from rljob_worker.rewards.answers.expression import Node, number
from rljob_worker.rewards.answers.forms import (
    Answer,
    Assigned,
    Matrix,
    Numeral,
    Ordered,
    Ratio,
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
_PI_OF_DEGREE = Fraction(1, 180)


def same(label: Answer, answer: Answer, budget: Budget) -> bool:
    """Whether an answer is the label's."""
    if label == answer:
        return True
    if isinstance(label, Assigned) or isinstance(answer, Assigned):
        return _assigned(label, answer, budget)
    if isinstance(label, Value) and isinstance(answer, Value):
        return _same_values(label, answer, budget)
    if isinstance(label, Numeral) or isinstance(answer, Numeral):
        return _same_numerals(label, answer)
    if isinstance(label, Ratio) or isinstance(answer, Ratio):
        return _same_ratios(label, answer, budget)
    if isinstance(label, Matrix) or isinstance(answer, Matrix):
        return _same_matrices(label, answer, budget)
    if isinstance(label, Words) and isinstance(answer, (Words, Value)):
        return _same_words(label, answer)
    if isinstance(answer, Words) and isinstance(label, Value):
        return _same_words(answer, label)
    return _same_collections(label, answer, budget)


def _same_words(label: Words, answer: Words | Value) -> bool:
    if isinstance(answer, Value):
        name = answer.node.name if answer.node.kind == "symbol" else answer.node.kind
        return len(label.text) == 1 and answer.unit is None and label.text in (name, name.upper())
    if len(label.text) == len(answer.text) == 1:
        return label.text.upper() == answer.text.upper()
    return label.text == answer.text or _without_article(label.text) == _without_article(answer.text) != ""


def _without_article(text: str) -> str:
    return re.sub(r"^(?:the|a|an) | ", "", text)


def _assigned(label: Answer, answer: Answer, budget: Budget) -> bool:
    if isinstance(label, Assigned) and isinstance(answer, Assigned):
        names = label.name, answer.name
        if names[0] != names[1] and all(len(name) == 1 for name in names):
            return False
        return same(label.to, answer.to, budget)
    one, other = (label, answer) if isinstance(label, Assigned) else (answer, label)
    assert isinstance(one, Assigned)
    if isinstance(other, Relation):
        curve = _curve(one)
        return curve is not None and _same_relations(curve, other, budget)
    return same(one.to, other, budget)


def _curve(assigned: Assigned) -> Relation | None:
    """`y = 2x + 1` as a relation; None where the value is a number, which is a solution and not a curve."""
    to = assigned.to
    if not isinstance(to, Value) or not to.node.symbols() or len(assigned.name) > 1:
        return None
    return Relation((Node("symbol", name=assigned.name), to.node), ("=",))


def _same_values(label: Value, answer: Value, budget: Budget) -> bool:
    one, other = label.node, answer.node
    if label.unit is not None and answer.unit is not None:
        if not label.unit.fits(answer.unit):
            return False
        one, other = _scaled(one, label.unit.factor), _scaled(other, answer.unit.factor)
    elif label.compound or answer.compound:
        return False
    if values.equal(one, other, budget):
        return True
    if label.percent != answer.percent:
        bare, percent = (one, other) if answer.percent else (other, one)
        return values.equal(bare, Node("divide", (percent, number(100))), budget)
    if label.degrees != answer.degrees:
        bare, degrees = (one, other) if answer.degrees else (other, one)
        radians = Node("multiply", (_scaled(degrees, _PI_OF_DEGREE), Node("pi")))
        return values.equal(bare, radians, budget)
    return False


def _scaled(node: Node, factor: Fraction) -> Node:
    return node if factor == 1 else Node("multiply", (node, number(factor)))


def _same_numerals(label: Answer, answer: Answer) -> bool:
    """Digits in a base, which may be left out as a unit may; other digits in another base are another answer."""
    numerals = [one for one in (label, answer) if isinstance(one, Numeral)]
    if len(numerals) == 2:
        return numerals[0] == numerals[1]
    other = answer if isinstance(label, Numeral) else label
    if not isinstance(other, Value) or other.node.kind != "number" or other.unit is not None:
        return False
    return numerals[0].digits == str(other.node.number)


def _same_ratios(label: Answer, answer: Answer, budget: Budget) -> bool:
    if isinstance(label, Ratio) and isinstance(answer, Ratio):
        one, other = ([item for item in ratio.items if not isinstance(item, Words)] for ratio in (label, answer))
        halves = {item.text for ratio in (label, answer) for item in ratio.items if isinstance(item, Words)}
        return len(halves) < 2 and len(one) == len(other) and all(map(lambda a, b: same(a, b, budget), one, other))
    ratio, value = (label, answer) if isinstance(label, Ratio) else (answer, label)
    assert isinstance(ratio, Ratio)
    parts = [item.node for item in ratio.items if isinstance(item, Value)]
    if len(ratio.items) != 2 or len(parts) != 2 or not isinstance(value, Value) or value.unit is not None:
        return False
    return values.equal(Node("divide", (parts[0], parts[1])), value.node, budget)


def _same_matrices(label: Answer, answer: Answer, budget: Budget) -> bool:
    rows = [_rows(one) for one in (label, answer)]
    if rows[0] is None or rows[1] is None:
        return False
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    return all(_all_same(one, other, budget) for one, other in zip(*rows, strict=True))


def _rows(answer: Answer) -> Sequence[Sequence[Answer]] | None:
    """A tuple is a column."""
    if isinstance(answer, Matrix):
        return None if answer.determinant else answer.rows
    if isinstance(answer, Ordered) and answer.opening in ("(", r"\langle"):
        return [[item] for item in answer.items]
    if isinstance(answer, Ordered) and answer.opening == "[":
        if all(isinstance(item, Ordered) and item.opening == "[" for item in answer.items):
            return [item.items for item in answer.items if isinstance(item, Ordered)]
        return [[item] for item in answer.items]
    return None


def _all_same(one: Sequence[Answer], other: Sequence[Answer], budget: Budget) -> bool:
    return len(one) == len(other) and all(same(a, b, budget) for a, b in zip(one, other, strict=True))


def _same_collections(label: Answer, answer: Answer, budget: Budget) -> bool:
    if isinstance(label, Relation) and isinstance(answer, Relation):
        if _same_relations(label, answer, budget):
            return True
        if _variables(label) != _variables(answer):
            return False
    if isinstance(label, Value) and isinstance(answer, Relation) and answer.signs == ("=",):
        # A quantity of the question with its value: m + n = 7.
        return not (label.node.symbols() | answer.sides[1].symbols()) and same(label, Value(answer.sides[1]), budget)
    if isinstance(label, Ordered) and isinstance(answer, Ordered):
        return _same_ordered(label, answer, budget)
    if isinstance(label, (Unordered, Value)) and isinstance(answer, (Unordered, Value)):
        items = [one.items if isinstance(one, Unordered) else (one,) for one in (label, answer)]
        if _same_unordered(items[0], items[1], budget):
            return True
    for ordered, other in ((label, answer), (answer, label)):
        is_list = isinstance(ordered, Ordered) and isinstance(other, Unordered) and not other.braces
        if is_list and _in_order(ordered, other, budget):
            return True
    sets = [_reals(one, budget) for one in (label, answer)]
    return sets[0] is not None and sets[1] is not None and _same_reals(sets[0], sets[1])


def _same_ordered(label: Ordered, answer: Ordered, budget: Budget) -> bool:
    kinds = [(one.opening.replace(r"\langle", "("), one.closing.replace(r"\rangle", ")")) for one in (label, answer)]
    if kinds[0] != kinds[1] and len(label.items) == 2:
        return False
    return _all_same(label.items, answer.items, budget)


def _in_order(ordered: Answer, other: Answer, budget: Budget) -> bool:
    """A list without brackets is the tuple of its items; with names, in the order of their names."""
    assert isinstance(ordered, Ordered)
    assert isinstance(other, Unordered)
    if ordered.opening == "[" and len(ordered.items) == 2 and ordered.closing == ")":
        return False
    items = list(other.items)
    names = [item.name for item in items if isinstance(item, Assigned)]
    if names and (len(set(names)) != len(items) or other.joint == "or"):
        return False
    if names:
        items = sorted(items, key=lambda item: item.name if isinstance(item, Assigned) else "")
    return _all_same(ordered.items, items, budget)


def _same_unordered(label: Sequence[Answer], answer: Sequence[Answer], budget: Budget) -> bool:
    """Every item of each has one in the other; with as many distinct ones."""
    one, other = _distinct(label, budget), _distinct(answer, budget)
    if len(one) != len(other):
        return False
    left = list(other)
    for item in one:
        found = next((index for index, candidate in enumerate(left) if same(item, candidate, budget)), None)
        if found is None:
            return False
        del left[found]
    return True


def _distinct(items: Sequence[Answer], budget: Budget) -> list[Answer]:
    distinct: list[Answer] = []
    for item in items:
        if item not in distinct:
            distinct.append(item)
    return distinct


def _same_relations(label: Relation, answer: Relation, budget: Budget) -> bool:
    if len(label.signs) != 1 or len(answer.signs) != 1:
        return False
    differences = _difference(label), _difference(answer)
    if differences[0] is None or differences[1] is None:
        return False
    one, sign = differences[0]
    other, other_sign = differences[1]
    if sign != other_sign:
        return False
    ratio = values.ratio(one, other, budget)
    return ratio in ((1, -1) if sign in ("=", r"\ne") else (1,))


def _variables(relation: Relation) -> set[str]:
    return set().union(*(side.symbols() for side in relation.sides))


def _difference(relation: Relation) -> tuple[Node, str] | None:
    """Difference of left and right side, with `<` or `\\le` as the sign of an inequality."""
    left, right = relation.sides
    sign = relation.signs[0]
    if sign in (">", r"\ge"):
        left, right, sign = right, left, {">": "<", r"\ge": r"\le"}[sign]
    if sign not in ("=", "<", r"\le", r"\ne"):
        return None
    return Node("add", (left, Node("negate", (right,)))), sign


def _reals(answer: Answer, budget: Budget) -> list[Interval] | None:
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
        return _solutions(answer, budget)
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


def _same_reals(one: Sequence[Interval], other: Sequence[Interval]) -> bool:
    return len(one) == len(other) and all(
        a[1] == b[1] and a[3] == b[3] and values.same_reals(a[0], b[0]) and values.same_reals(a[2], b[2])
        for a, b in zip(one, other, strict=True)
    )
