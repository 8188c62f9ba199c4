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
    Unordered,
    Value,
    Words,
)
from rljob_worker.rewards.answers.intervals import reals, same_sets
from rljob_worker.rewards.answers.values import Budget, NoValueError, Number

_NUMBERS = {"R": "all real numbers", "Z": "integers", "Q": "rational numbers"}
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
        if label.text in _NUMBERS.values():
            return answer.unit is None and _NUMBERS.get(answer.node.name) == label.text
        head, modulus, _ = label.text.partition(r"\pmod")
        if modulus:
            return answer.unit is None and answer.node.kind == "number" and head == str(answer.node.number)
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
    if _is_of_another(label, answer) or _is_of_another(answer, label):
        return False
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


def _is_of_another(one: Value, other: Value) -> bool:
    """Whether one has a unit and the other a mark that says something else."""
    return one.unit is not None and (other.percent or (other.degrees and "angle" not in one.unit.powers))


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
        # A quantity of the question with its value: m + n = 7, or 7 = m + n.
        found = [side for side in answer.sides if not side.symbols()]
        return not label.node.symbols() and len(found) == 1 and same(label, Value(found[0]), budget)
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
    sets = [reals(one, budget) for one in (label, answer)]
    return sets[0] is not None and sets[1] is not None and same_sets(sets[0], sets[1])


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
    """Items that are not written alike and, where they are numbers, not of one value."""
    distinct: list[Answer] = []
    found: list[Number] = []
    for item in items:
        if item in distinct:
            continue
        number_of = _exactly(item, budget)
        if number_of is not None and number_of in found:
            continue
        if number_of is not None:
            found.append(number_of)
        distinct.append(item)
    return distinct


def _exactly(item: Answer, budget: Budget) -> Number | None:
    """The rational value of a bare number, else None."""
    if not isinstance(item, Value) or item != Value(item.node) or item.node.symbols():
        return None
    try:
        found = values.value(item.node, budget)
    except NoValueError:
        return None
    return found if isinstance(found, Fraction) else None


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
