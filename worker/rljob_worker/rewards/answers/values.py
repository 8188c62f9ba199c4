"""Values of expressions, exact where rational and of 60 digits elsewhere, and whether two of them are equal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from math import comb, factorial, gcd, lcm, prod
from typing import Any

import mpmath
from mpmath.libmp import NoConvergence

from rljob_worker.rewards.answers.expression import Node, number

Number = Any
"""An integer, a Fraction, or a number of mpmath, which has no types."""

_CONTEXT = mpmath.mp.clone()
_CONTEXT.dps = 60
_TOLERANCE = _CONTEXT.mpf(10) ** -40
INFINITY = _CONTEXT.inf
_POINTS = 7
_ENOUGH_POINTS = 3
_WHOLE_POINTS = 24
_LARGEST_WHOLE = 13
_MAX_BITS = 1 << 17
"""Most bits of a number that is kept exactly."""
_MAX_MAGNITUDE = 1 << 20
"""Largest binary exponent of a power."""
_MAX_ARGUMENT = 1 << 10
"""Binary exponent of what functions take."""
_MAX_FACTORIAL = 2100
"""The years that contests put into their questions are below it."""
_DIGITS_OF_AN_APPROXIMATION = 6
_ROUNDING = Fraction(1, 10**30)


class NoValueError(ArithmeticError):
    """An expression without a value here, or with one that is too large to be worked out."""


class Budget:
    """Operations that may still be done for one score."""

    def __init__(self, operations: int = 20_000):
        self.left = operations

    def spend(self) -> None:
        """Count one operation. Raises NoValueError when too many were done."""
        self.left -= 1
        if self.left < 0:
            raise NoValueError("too many operations")


def value(node: Node, budget: Budget, point: Mapping[str, Number] | None = None) -> Number:
    """The value as a Fraction, or as mpmath's number. Raises NoValueError."""
    budget.spend()
    if node.kind == "number":
        return node.number
    if node.kind == "symbol":
        if point is None:
            raise NoValueError(node.name)
        return point[node.name]
    if node.kind in _CONSTANTS:
        return _CONSTANTS[node.kind]
    parts = [value(part, budget, point) for part in node.parts]
    try:
        return _checked(_OPERATIONS[node.kind](*parts))
    except (ZeroDivisionError, ValueError, OverflowError, NoConvergence) as error:
        raise NoValueError(str(error)) from None


def _checked(result: Number) -> Number:
    if isinstance(result, Fraction):
        if max(result.numerator.bit_length(), result.denominator.bit_length()) > _MAX_BITS:
            return _float(result)
        return result
    if _CONTEXT.isnan(result):
        raise NoValueError("not a number")
    return result


def _float(of: Number) -> Number:
    if isinstance(of, Fraction):
        return _CONTEXT.mpf(of.numerator) / of.denominator
    return of


def _magnitude(number: Number) -> int:
    """Binary exponent of what is finite and not 0."""
    if not number:
        return 0
    size = _CONTEXT.mag(_float(number))
    if not isinstance(size, int):
        raise NoValueError("infinite")
    return size


def _exact(operation: Callable[[Number, Number], Number]) -> Callable[..., Number]:
    def both(left: Number, right: Number) -> Number:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return _checked(operation(left, right))
        return operation(_float(left), _float(right))

    return lambda *parts: reduce(both, parts)


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        times = abs(exponent.numerator)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if times * bits <= _MAX_BITS:
            return base**exponent.numerator
    if not _CONTEXT.isinf(_float(base)) and not _CONTEXT.isinf(_float(exponent)):
        size = max(1, abs(_magnitude(base)))
        if _magnitude(exponent) > 40 or abs(_float(exponent)) * size > _MAX_MAGNITUDE:
            raise NoValueError("a power that is too large")
    return _simplified_root(base, exponent)


def _simplified_root(base: Number, exponent: Number) -> Number:
    """The power; of a negative number and an odd root the real one, as in school."""
    if isinstance(exponent, Fraction) and exponent.denominator % 2 and _is_negative(base):
        sign = -1 if exponent.numerator % 2 else 1
        return sign * _CONTEXT.power(-_float(base), _float(exponent))
    return _CONTEXT.power(_float(base), _float(exponent))


def _is_negative(number: Number) -> bool:
    return isinstance(number, (Fraction, _CONTEXT.mpf)) and number < 0


def _root(under: Number, degree: Number) -> Number:
    if not isinstance(degree, Fraction) or degree == 0:
        return _power(under, 1 / _float(degree))
    if isinstance(under, Fraction) and under >= 0 and degree.denominator == 1 and 2 <= degree <= 10:
        roots = [_integer_root(part, int(degree)) for part in (under.numerator, under.denominator)]
        if roots[0] is not None and roots[1] is not None:
            return Fraction(roots[0], roots[1])
    return _power(under, 1 / degree)


def _integer_root(number: int, degree: int) -> int | None:
    if number.bit_length() > 1000:
        return None
    guess = round(_CONTEXT.root(number, degree)) if number else 0
    return guess if guess**degree == number else None


def _factorial(of: Number) -> Number:
    if not isinstance(of, Fraction) or of.denominator != 1 or not 0 <= of <= _MAX_FACTORIAL:
        raise NoValueError("a factorial of what is no small whole number")
    return Fraction(factorial(of.numerator))


def _double_factorial(of: Number) -> Number:
    if not isinstance(of, Fraction) or of.denominator != 1 or not 0 <= of <= _MAX_FACTORIAL:
        raise NoValueError("a factorial of what is no small whole number")
    return Fraction(prod(range(of.numerator, 0, -2)))


def _binomial(top: Number, bottom: Number) -> Number:
    whole = [of.numerator for of in (top, bottom) if isinstance(of, Fraction) and of.denominator == 1]
    if len(whole) != 2 or not 0 <= whole[1] <= whole[0] <= _MAX_FACTORIAL:
        raise NoValueError("a binomial of what are no small whole numbers")
    return Fraction(comb(*whole))


def _of_whole(function: Callable[[int, int], int]) -> Callable[[Number, Number], Number]:
    def apply(left: Number, right: Number) -> Number:
        whole = [of.numerator for of in (left, right) if isinstance(of, Fraction) and of.denominator == 1]
        if len(whole) != 2:
            raise NoValueError("a divisor or multiple of what are no whole numbers")
        return Fraction(function(*whole))

    return apply


def _of_ordered(function: Callable[[Number, Number], Number]) -> Callable[[Number, Number], Number]:
    def apply(left: Number, right: Number) -> Number:
        if isinstance(left, _CONTEXT.mpc) or isinstance(right, _CONTEXT.mpc):
            raise NoValueError("the larger of complex numbers")
        both = (
            (left, right) if isinstance(left, Fraction) and isinstance(right, Fraction) else map(_float, (left, right))
        )
        return function(*both)

    return apply


def _function(name: str) -> Callable[[Number], Number]:
    function = getattr(_CONTEXT, name)

    def apply(argument: Number) -> Number:
        if _magnitude(argument) > (20 if name in ("exp", "sinh", "cosh") else _MAX_ARGUMENT):
            raise NoValueError("an argument that is too large")
        return function(_float(argument))

    return apply


def _logarithm(argument: Number) -> Number:
    if not argument:
        raise NoValueError("a logarithm of 0")
    return _CONTEXT.ln(_float(argument))


def _whole(rounding: Callable[[Number], Number]) -> Callable[[Number], Number]:
    def apply(number: Number) -> Number:
        if _magnitude(number) > _MAX_ARGUMENT or isinstance(number, _CONTEXT.mpc):
            raise NoValueError("too large")
        return Fraction(int(rounding(_float(number))))

    return apply


_CONSTANTS: dict[str, Number] = {
    "pi": +_CONTEXT.pi, "e": +_CONTEXT.e, "i": _CONTEXT.mpc(0, 1), "infty": _CONTEXT.inf,
}  # fmt: skip
_FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp")
_OPERATIONS: dict[str, Callable[..., Number]] = {
    "add": _exact(lambda left, right: left + right),
    "multiply": _exact(lambda left, right: left * right),
    "divide": _exact(lambda left, right: left / right),
    "negate": lambda of: -of,
    "abs": lambda of: abs(of),
    "power": _power,
    "root": _root,
    "factorial": _factorial,
    "double_factorial": _double_factorial,
    "binomial": _binomial,
    "gcd": _of_whole(gcd),
    "lcm": _of_whole(lcm),
    "max": _of_ordered(max),
    "min": _of_ordered(min),
    "floor": _whole(_CONTEXT.floor),
    "ceil": _whole(_CONTEXT.ceil),
    "ln": _logarithm,
    "log": _logarithm,
}
_OPERATIONS |= {name: _function(name) for name in _FUNCTIONS}


def equal(left: Node, right: Node, budget: Budget) -> bool:
    """Whether two expressions have the same value, at every point where both have one.

    A decimal of six or more significant digits equals an exact value that rounds, or is cut off, to it. What has no
    value that can be worked out equals what is written alike.
    """
    if left == right or _equal_everywhere(left, right, budget):
        return True
    # A logarithm without a base is the natural one, or that of ten.
    decimal = _decimal(left), _decimal(right)
    return decimal != (left, right) and _equal_everywhere(*decimal, budget)


def _decimal(node: Node) -> Node:
    parts = tuple(map(_decimal, node.parts))
    if node.kind == "log":
        return Node("divide", (Node("ln", parts), Node("ln", (number(10),))))
    return replace(node, parts=parts) if parts != node.parts else node


def _equal_everywhere(left: Node, right: Node, budget: Budget) -> bool:
    names = left.symbols() | right.symbols()
    try:
        if not names:
            return _same(value(left, budget), value(right, budget)) or _approximates(left, right, budget)
        pairs = _at_points(left, right, names, budget)
    except NoValueError:
        return False
    return len(pairs) >= _ENOUGH_POINTS and all(_same(a, b) for a, b in pairs)


def _at_points(left: Node, right: Node, names: set[str], budget: Budget) -> list[tuple[Number, Number]]:
    """Both values at points where both have one that is finite and, unless i is in them, real."""
    pairs = []
    is_complex = _has_i(left) or _has_i(right)
    is_whole = _counts(left) or _counts(right)
    coordinate = _whole_coordinate if is_whole else _coordinate
    for index in range(_WHOLE_POINTS if is_whole else _POINTS):
        point = {name: coordinate(name, index) for name in names}
        found = []
        for node in (left, right):
            try:
                found.append(value(node, budget, point))
            except NoValueError:
                if budget.left < 0:
                    raise
                found.append(None)
        if all(one is None for one in found):
            continue
        usable = [one is not None and (is_complex or not isinstance(one, _CONTEXT.mpc)) for one in found]
        if all(usable):
            pairs.append((found[0], found[1]))
    return pairs


def _coordinate(name: str, index: int) -> Number:
    """A number between 1/2 and 5/2 that belongs to the name, negative at the last points."""
    digest = hashlib.sha256(f"{name} {index}".encode()).digest()
    size = Fraction(1, 2) + Fraction(int.from_bytes(digest[:4], "big"), 1 << 31)
    return _float(-size if index >= _POINTS - 3 and digest[5] % 4 else size)


def _whole_coordinate(name: str, index: int) -> Number:
    return Fraction(hashlib.sha256(f"{name} {index}".encode()).digest()[0] % _LARGEST_WHOLE)


def _counts(node: Node) -> bool:
    """Whether an expression has values at whole numbers alone: a factorial of a variable, `(-1)^n`."""
    if node.kind in ("factorial", "double_factorial", "binomial") and node.symbols():
        return True
    if node.kind == "power" and node.parts[0].kind == "negate" and not node.parts[0].symbols():
        return bool(node.parts[1].symbols())
    return any(map(_counts, node.parts))


def _has_i(node: Node) -> bool:
    return node.kind == "i" or any(map(_has_i, node.parts))


def _same(left: Number, right: Number) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = _float(left), _float(right)
    if _CONTEXT.isinf(left) or _CONTEXT.isinf(right):
        return bool(left == right)
    scale = max(abs(left), abs(right))
    return bool(abs(left - right) <= _TOLERANCE * (scale if scale and min(abs(left), abs(right)) else 1))


def _approximates(left: Node, right: Node, budget: Budget) -> bool:
    for rounded, exact in ((left, right), (right, left)):
        sign = -1 if rounded.kind == "negate" else 1
        inner = rounded.parts[0] if sign < 0 else rounded
        if inner.kind != "number" or inner.decimals is None or has_decimals(exact):
            continue
        unit = Fraction(10) ** -inner.decimals
        if abs(inner.number) / unit < 10 ** (_DIGITS_OF_AN_APPROXIMATION - 1):
            continue
        found = value(exact, budget)
        if isinstance(found, _CONTEXT.mpc) or _CONTEXT.isinf(_float(found)):
            continue
        excess = found - sign * inner.number if isinstance(found, Fraction) else found - _float(sign * inner.number)
        # A whole unit off is another number: 0.999999 is no way to write 1. What is no fraction is off by its rounding.
        low, high = (_float(edge) for edge in (-unit / 2, unit * (1 - _ROUNDING)))
        if low <= _float(excess) * sign < high:
            return True
    return False


def has_decimals(node: Node) -> bool:
    """Whether one of its numbers is written with a point."""
    return node.decimals is not None or any(map(has_decimals, node.parts))


def real(node: Node, budget: Budget) -> Number:
    """The value as a real number of mpmath, infinity included. Raises NoValueError."""
    found = _float(value(node, budget))
    if isinstance(found, _CONTEXT.mpc):
        raise NoValueError("not real")
    return found


def same_reals(left: Number, right: Number) -> bool:
    """Whether two results of `real` are equal."""
    return _same(left, right)


def ratio(left: Node, right: Node, budget: Budget) -> int | None:
    """The sign of the constant by which one expression is the other, 0 for none; None where that is unknown."""
    names = left.symbols() | right.symbols()
    try:
        pairs = _at_points(left, right, names, budget)
        ratios = [_float(a) / _float(b) for a, b in pairs if a and b]
    except (NoValueError, ZeroDivisionError):
        return None
    if len(ratios) < _ENOUGH_POINTS:
        return None
    if not all(_same(one, ratios[0]) for one in ratios):
        return 0
    return -1 if _is_negative(ratios[0]) else 1
