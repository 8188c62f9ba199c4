"""Values with what stands behind them: units, money, percent, degrees."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from itertools import islice

from rljob_worker.rewards.answers.expression import Node, NotAnExpressionError, number, parse
from rljob_worker.rewards.answers.forms import Value
from rljob_worker.rewards.answers.units import Unit, is_known, read_unit

_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
NUMBER_WORDS = {word: index for index, word in enumerate(_WORDS.split())}
_BEFORE_TY = "twen thir for fif six seven eigh nine"
_TENS = {f"{word}ty": 10 * index for index, word in enumerate(_BEFORE_TY.split(), 2)}
_PARTS = {
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10,
}  # fmt: skip
_THOUSANDS = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_MAX_MARKS = 3
_CODES = "USD|EUR|GBP|RMB|CNY|INR"
_CURRENCY = re.compile(
    r"^([-+]?) ?(?:US ?|\\text\{ ?(?:US|Rs|RM|USD)\.? ?\} ?)?"
    rf"([$€£¥₹]|\\text\{{ ?(?:[$€£¥₹]|{_CODES}) ?\}}|(?:{_CODES})(?= )) ?(?=[\d.(\\-])"
)
_QUANTITIES = re.compile(
    r"(?<![\d.])(\d+(?:\.\d+)?) ?(\\text\{[^{}]*\}|[A-Za-z]+|[^\W\d_a-zA-Z]+)\.? ?"
    r"(?:,|and\b|\\text\{ ?and ?\})? ?"
)
_SCALES = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "万": 10**4, "亿": 10**8,
}  # fmt: skip
_SCALED = re.compile(rf"(.*[\w}})]) ?(?:\\text\{{ ?)?({'|'.join(_SCALES)})(?![a-z]) ?\}}? ?(.*)")
_PERCENT = re.compile(
    r"^(.*?) ?(?:%|\\text\{ ?(?:%|percent|per cent) ?\}|(?<![A-Za-z])(?:percent|per cent|pct)|百分之)$"
)
_DEGREES = re.compile(r"^(.*?) ?(?:\\deg|\\text\{ ?(?:degrees?|deg|度) ?\}|(?<![A-Za-z])degrees?|度)$")
_TEMPERATURE = re.compile(
    r"(.*\d) ?(?:\\deg ?(?:\\text\{ ?)?|(?:\\text\{ ?)?degrees? )([CF])(?:elsius|ahrenheit)? ?\}?"
)
_NEGATIVE = re.compile(r"(?:\\text\{ ?)?(?:negative|minus|负) ?\}? ?(?=[\d.\\])")
_ABOUT = re.compile(
    r"^\\(?:approx|sim) ?|^(?:\\text\{ ?)?(?:about|approximately|exactly|roughly) ?\}? ?|"
    r"^\\text\{[^{}\d]*(?: is| are|=|:| equals) ?\} ?|"
    r"^(?:\\text\{)?(?=[^{}\\\d]*[\u4e00-\u9fff])[^{}\\\d不没無无非]{0,40}(?:[是为有共得:=]|等于) ?\}? ?"
)


def in_words(text: str) -> Fraction | None:
    """The number that words say: seven, twenty-one, one hundred and five, one half; None where they say none."""
    words = text.lower().replace("-", " ").split()
    if len(words) > 1 and words[0] in ("negative", "minus"):
        whole = _whole_number(words[1:])
        return None if whole is None else -whole
    if words == ["half"]:
        return Fraction(1, 2)
    if len(words) == 2 and (part := _PARTS.get(words[1].removesuffix("s"))) is not None:
        count = 1 if words[0] in ("a", "an") else NUMBER_WORDS.get(words[0])
        return Fraction(count, part) if count else None
    return _whole_number(words)


def _whole_number(words: list[str]) -> Fraction | None:
    """Groups of at most three digits, each with its thousand or million."""
    total, group, least = 0, 0, 1000
    for index, word in enumerate(words):
        if word in _THOUSANDS and group:
            total, group, least = total + group * _THOUSANDS[word], 0, 1000
        elif word == "hundred" and 0 < group < 10:
            group, least = group * 100, 100
        elif word in _TENS and least > 10:
            group, least = group + _TENS[word], 10
        elif (one := NUMBER_WORDS.get(word)) is not None and one < least and (one or len(words) == 1):
            group, least = group + one, 0
        elif word != "and" or not 0 < index < len(words) - 1:
            return None
    return Fraction(total + group) if words else None


def compound(text: str) -> Value | None:
    """Several numbers with units of one dimension."""
    found = list(_QUANTITIES.finditer(text))
    if len(found) < 2 or "".join(one[0] for one in found) != text:
        return None
    total, units = Fraction(0), list[Unit]()
    for one in found:
        unit = read_unit(one[2], quantity_words=False)
        if unit is None or unit.nouns or not unit.powers:
            return None
        # 3 h 20 min is one time; 6 cm and 4 cm are two lengths.
        if units and (unit.powers != units[-1].powers or unit.factor >= units[-1].factor):
            return None
        units.append(unit)
        total += parse(one[1]).number * unit.factor
    return Value(number(total), Unit(units[0].powers), compound=True)


def balanced(text: str) -> bool:
    """Whether every bracket has its partner."""
    depth = 0
    for mark in re.findall(r"\\[{}]|[{}()\[\]]", text):
        depth += 1 if mark in ("(", "[", "{", r"\{") else -1
        if depth < 0:
            return False
    return depth == 0


def value(text: str, depth: int = 0) -> Value | None:
    """An expression with or without a unit, a percent sign or degrees behind it."""
    if depth > _MAX_MARKS:
        return None
    text = _NEGATIVE.sub("-", _ABOUT.sub("", text), count=1)
    if text.endswith("‰"):
        inner = value(text[:-1].rstrip(), depth + 1)
        return None if inner is None else replace(inner, node=Node("divide", (inner.node, number(1000))))
    money = _CURRENCY.match(text)
    if (said := in_words(text)) is not None:
        return Value(number(said))
    if money is not None:
        unit = read_unit(money[2].removeprefix(r"\text{").rstrip("} ").strip(), quantity_words=False)
        inner = value(money[1] + text[money.end() :], depth + 1)
        return None if inner is None else replace(inner, unit=unit)
    percent = _PERCENT.match(text)
    if percent is not None:
        inner = value(percent[1], depth + 1)
        return None if inner is None else replace(inner, percent=True)
    degrees = None if _ANGLE_FUNCTION.search(text) else _DEGREES.match(text)
    if degrees is not None:
        inner = value(degrees[1], depth + 1)
        return None if inner is None else replace(inner, degrees=True)
    temperature = _TEMPERATURE.fullmatch(text)
    if temperature is not None:
        return _checked_value(temperature[1], Unit(nouns=frozenset({"degrees " + temperature[2]})))
    if re.fullmatch(r"[A-Za-z]{3,}", text) and not set(text) <= set("abcdxyz") and text not in ("infinity", "inf"):
        return None
    scaled = _SCALED.fullmatch(text)
    if scaled is not None:
        return _scaled(scaled[1], scaled[2], scaled[3], depth)
    try:
        return Value(parse(_spaced_mixed(text)))
    except NotAnExpressionError:
        return quantity(text, spaced=False)


def _scaled(head: str, word: str, unit: str, depth: int) -> Value | None:
    """Value of `7 million`, with or without a unit."""
    inner, behind = value(head, depth + 1), read_unit(unit, quantity_words=True)
    if inner is None or inner.unit is not None or behind is None:
        return None
    node = Node("multiply", (inner.node, number(_SCALES[word])))
    return replace(inner, node=node, unit=behind if behind.powers or behind.nouns else None)


_ANGLE_FUNCTION = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])")


def _spaced_mixed(text: str) -> str:
    """A mixed number in plain characters as one in LaTeX."""
    return re.sub(r"(?<![\d./])(\d+) (\d+) ?/ ?(\d+)(?![\d./])", r"\1\\frac{\2}{\3}", text)


_MOST_STARTS = 200
"""Places at which a unit may begin that are looked at."""
_UNIT_STARTS = re.compile(r"\\text\{|[A-Za-zμΩ¢€£]+|[^\W\d_a-zA-Z]+")


def quantity(text: str, spaced: bool) -> Value | None:
    """A number and its unit. `spaced`: a single letter right behind a digit counts as one."""
    for found in islice(_UNIT_STARTS.finditer(text), _MOST_STARTS):
        start = found.start()
        head, tail = text[:start].rstrip(), text[start:]
        if not head or text[start - 1 : start] == "\\" or not balanced(head):
            continue
        if re.fullmatch(r"(?:\\text\{ ?)?(?:st|nd|rd|th) ?\}?", tail) and head[-1:].isdigit():
            return _checked_value(head, None)
        word = found[0]
        if len(word) == 1 and word.isascii() and not spaced and text[start - 1] != " " and not is_known(word):
            continue
        if len(word) == 1 and word.isascii() and text[start - 1] != " " and not spaced and not word.startswith("\\"):
            continue
        unit = read_unit(tail, quantity_words=word.islower() or not word.isascii())
        if unit is not None:
            said = unit if unit.powers or unit.nouns else None
            return _checked_value(head, said, is_text=tail.startswith("\\text"))
    return None


def _checked_value(head: str, unit: Unit | None, is_text: bool = False) -> Value | None:
    inner = head.rstrip("-~ *")
    money = _CURRENCY.match(inner)
    try:
        node = parse(_spaced_mixed(inner[money.end() :] if money else inner))
    except NotAnExpressionError:
        said = in_words(inner)
        if said is None:
            return None
        node = number(said)
    return None if node.symbols() and not is_text else Value(node, unit)
