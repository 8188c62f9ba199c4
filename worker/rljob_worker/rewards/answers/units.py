"""Units behind a number, and how they compare."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

_INCH = Fraction(254, 10000)
_POUND = Fraction(45359237, 100000)
_KNOWN: dict[str, tuple[str, Fraction, str]] = {}


def _define(dimension: str, *units: tuple[Fraction | int, str, str]) -> None:
    """Units of one dimension: factor, symbols (which are case-sensitive), words."""
    for factor, symbols, words in units:
        for name in (symbols + " " + words).split():
            _KNOWN[name] = (dimension, Fraction(factor), name)


_define(
    "length",
    (Fraction(1, 1000), "mm", "millimeter millimetre 毫米"), (Fraction(1, 100), "cm", "centimeter centimetre 厘米"),
    (Fraction(1, 10), "dm", "decimeter decimetre 分米"), (1, "m", "meter metre 米"),
    (1000, "km", "kilometer kilometre 千米 公里"), (_INCH, "in", "inch inche"), (12 * _INCH, "ft", "foot feet"),
    (36 * _INCH, "yd", "yard"), (63360 * _INCH, "mi", "mile"),
)  # fmt: skip
_define(
    "time",
    (Fraction(1, 1000), "ms", "millisecond"), (1, "s sec", "second 秒"), (60, "min", "minute 分钟"),
    (3600, "h hr", "hour 小时 时"), (86400, "d", "day 天"), (604800, "wk", "week 周"),
)  # fmt: skip
_define("months", (1, "", "month 个月"), (12, "yr", "year 年 岁"))
_define(
    "mass",
    (Fraction(1, 1000), "mg", "milligram"), (1, "g", "gram 克"), (1000, "kg", "kilogram 千克 公斤"),
    (_POUND, "lb", "pound"), (_POUND / 16, "oz", "ounce"), (1000000, "t", "ton tonne 吨"),
)  # fmt: skip
_define("volume", (Fraction(1, 1000), "mL ml", "milliliter millilitre 毫升"), (1, "L", "liter litre 升"))
_define("dollars", (1, "$ USD", "dollar buck"), (Fraction(1, 100), "¢", "cent"))
_define("yuan", (1, "¥ RMB CNY", "yuan 元"))
_define("euros", (1, "€ EUR", "euro"))
_define("sterling", (1, "£ GBP", "quid"))
_define("rupees", (1, "₹ INR Rs", "rupee"))
_define("angle", (1, "rad", "radian"))
_define("newton", (1, "N", "newton"))
_define("joule", (1, "J", "joule"), (1000, "kJ", "kilojoule"))
_define("watt", (1, "W", "watt"), (1000, "kW", "kilowatt"))
_define("volt", (1, "V", "volt"))
_define("ampere", (1, "A", "ampere amp"))
_define("hertz", (1, "Hz", "hertz"))
_define("pascal", (1, "Pa", "pascal"))
_define("mole", (1, "mol", "mole"))
_define("kelvin", (1, "K", "kelvin"))
_define("ohm", (1, "Ω", "ohm"))
_COMPOUND = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "cc": "cm^3", "sq": "square", "cu": "cubic"}
_EMPTY = frozenset(["of", "a", "an", "the", "total", "units", "unit", "个", "only"])
_NOT_UNITS = frozenset(["sin", "cos", "tan", "cot", "sec", "csc", "ln", "exp", "log", "sqrt", "pi", "mod", "theta"])
_PIECE = re.compile(
    r"\\text\{((?:[^{}]|\{[^{}]*\})*)\}|([A-Za-zμΩ]+)\.?|([^\W\d_a-zA-Z]+)|(\^ ?\{? ?(-?\d) ?\}?)|"
    r"([/*$¢€£¥₹.() -])"
)


@dataclass(frozen=True, slots=True)
class Unit:
    """Known units as powers of dimensions with a factor, and the nouns of everything else."""

    powers: dict[str, int] = field(default_factory=dict)
    factor: Fraction = Fraction(1)
    nouns: frozenset[str] = frozenset()

    def fits(self, other: Unit) -> bool:
        """Whether numbers with the two can be compared."""
        if self.powers != other.powers:
            return False
        return self.nouns == other.nouns or bool(self.nouns & other.nouns)


_LONGEST = 400
"""Characters of a unit and of nouns behind a number: each place where a unit may begin is read to the end."""


def is_known(word: str) -> bool:
    """Whether a word or symbol is a unit."""
    return _singular(word) is not None or word in _COMPOUND


def read_unit(text: str, quantity_words: bool) -> Unit | None:
    """The unit that a whole text is; None when it is none.

    Args:
        text: what stands behind a number, as `characters.clean` gave it.
        quantity_words: whether words that are no known units count as nouns outside `\\text`.
    """
    if len(text) > _LONGEST:
        return None
    words: list[tuple[str, bool]] = []
    position = 0
    while position < len(text):
        found = _PIECE.match(text, position)
        if found is None:
            return None
        position = found.end()
        if found[1] is not None:
            words += [(word, True) for word in re.findall(r"[^\W\d_]+|[/*^$¢]|-?\d", found[1])]
        elif found[2] or found[3]:
            words.append((found[2] or found[3], bool(found[3])))
        elif found[5]:
            words += [("^", True), (found[5], True)]
        elif found[6].strip() and found[6] not in ".()":
            words.append((found[6], True))
    return _unit(words, quantity_words)


def _unit(words: list[tuple[str, bool]], quantity_words: bool) -> Unit | None:
    powers: Counter[str] = Counter()
    factor = Fraction(1)
    nouns: set[str] = set()
    sign, next_power = 1, 1
    last: tuple[str, Fraction] | None = None
    pieces = [piece for word, is_text in words for piece in _expanded(word, is_text)]
    for index, (word, is_text) in enumerate(pieces):
        if word == "in" and index + 1 < len(pieces):
            continue
        if word in ("/", "per", "every", "each"):
            sign, last = -1, None
        elif word in ("square", "squared", "cubic", "cubed"):
            power = 2 if word.startswith("sq") else 3
            if word.endswith("d"):
                if last is None:
                    return None
                powers[last[0]] += sign * (power - 1)
                factor *= last[1] ** (sign * (power - 1))
            else:
                next_power = power
        elif word == "^" and last is not None and index + 1 < len(pieces):
            digits = pieces[index + 1][0]
            if not digits.lstrip("-").isdigit():
                return None
            power = int(digits) - 1
            powers[last[0]] += sign * power
            factor *= last[1] ** (sign * power)
        elif word in ("*", "-", "^") or word.lower() in _EMPTY or word.lstrip("-").isdigit():
            continue
        elif (known := _singular(word)) is not None:
            powers[known[0]] += sign * next_power
            factor *= known[1] ** (sign * next_power)
            last, next_power = known, 1
        elif word in _NOT_UNITS or not (is_text or (quantity_words and len(word) > 2)):
            return None
        else:
            nouns.add(_stem(word))
            last = None
    return Unit({name: power for name, power in powers.items() if power}, factor, frozenset(nouns))


def _expanded(word: str, is_text: bool) -> list[tuple[str, bool]]:
    spelled = _COMPOUND.get(word, word)
    if not word.isascii():
        for chinese, english in (("平方", "square"), ("立方", "cubic"), ("每", "per")):
            spelled = spelled.replace(chinese, f" {english} ")
    if spelled == word:
        return [(word, is_text)]
    return [(piece, is_text) for piece in re.findall(r"[^\W\d_]+|[/^]|\d", spelled)]


def _singular(word: str) -> tuple[str, Fraction] | None:
    lower = word.lower()
    for name in (word, lower, lower.removesuffix("s") if len(word) > 2 else word):
        if name in _KNOWN and (name == word or len(name) > 2):
            return _KNOWN[name][:2]
    symbol = word.removesuffix("s")
    if len(word) > 2 and symbol in _KNOWN:
        return _KNOWN[symbol][:2]
    return None


def _stem(word: str) -> str:
    word = word.lower()
    for ending, other in (("ies", "y"), ("es", ""), ("s", "")):
        if word.endswith(ending) and len(word) > len(ending) + 2:
            return (word.removesuffix(ending) + other).rstrip("e")
    return word.rstrip("e")
