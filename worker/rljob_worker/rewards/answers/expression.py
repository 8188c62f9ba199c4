"""Expressions in LaTeX or in plain characters, as trees."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_TOKENS = 600
MAX_DEPTH = 40
MAX_DIGITS = 2000
_MOST_MARKS = 4
"""Factorials and degrees one behind the other."""


class NotAnExpressionError(ValueError):
    """The text has no reading as an expression, or is too long for one."""


@dataclass(frozen=True, slots=True)
class Node:
    """A number, a symbol, or an operation on `parts`."""

    kind: str
    parts: tuple[Node, ...] = ()
    number: Fraction = Fraction(0)
    name: str = ""
    decimals: int | None = None
    """Digits behind the point of a number that is written with one."""

    def symbols(self) -> set[str]:
        """Names of the variables."""
        if self.kind == "symbol":
            return {self.name}
        return set().union(*(part.symbols() for part in self.parts))


def number(value: Fraction | int) -> Node:
    """A number that is known exactly."""
    return Node("number", number=Fraction(value))


_LETTERS = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
)
_GREEK = frozenset(_LETTERS.split())
_NAMES = "sin cos tan cot sec csc asin acos atan sinh cosh tanh ln exp log"
_FUNCTIONS = frozenset(_NAMES.split())
_WORDS = {"sqrt": "sqrt", "pi": "pi", "infinity": "infty", "inf": "infty", "oo": "infty", "arcsin": "asin",
          "arccos": "acos", "arctan": "atan", "theta": "theta"} | {name: name for name in _FUNCTIONS}  # fmt: skip
_FACTORIALS = {"!": "factorial", "!!": "double_factorial"}
_NUMERALS = ("number", "repeating", "dots")
_TOKEN = re.compile(
    r"(?P<repeating>\d*\.\d*\\(?:overline|bar|dot)\s*\{?(?P<period>\d+)\}?)"
    r"|(?P<dots>\d*\.\d+)\.\.\."
    r"|(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|\\(?P<command>[a-zA-Z]+)"
    r"|(?P<word>[a-zA-Z]+)"
    r"|(?P<mark>\\[{}|]|!!|[-+*/^_(){}\[\]|!])"
    r"|(?P<space>\s+)"
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    spaced: bool = False
    """Whether white space stands before it."""


def parse(text: str) -> Node:
    """The tree of a text that `characters.clean` gave. Raises NotAnExpressionError."""
    return _Parser(_tokens(text)).whole()


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position, spaced = 0, False
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None or len(tokens) > MAX_TOKENS:
            raise NotAnExpressionError(text[position : position + 20])
        position = found.end()
        kind = str(found.lastgroup) if found["repeating"] is None else "repeating"
        if kind == "space":
            spaced = True
            continue
        if kind == "word" and found[0] not in _WORDS:
            letters = _letters(found[0])
            tokens += [_Token("word", letter, spaced and not index) for index, letter in enumerate(letters)]
        else:
            content = found["command"] or found["dots"] or found[0]
            tokens.append(_Token(kind, content, spaced))
        spaced = False
    return tokens


def _letters(word: str) -> list[str]:
    """The variables whose product a run of letters is; words are none."""
    for name in sorted(_WORDS, key=len, reverse=True):
        if len(name) > 2 and word.endswith(name) and len(word) - len(name) <= 2:
            return [*word[: -len(name)], name]
    if len(word) > 3 and not set(word.lower()) <= set("abcdkmnpqrstxyz"):
        raise NotAnExpressionError(word)
    return [*word[:-2], "pi"] if word.endswith("pi") and len(word) > 2 else list(word)


class _Parser:
    def __init__(self, tokens: list[_Token]):
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._bars = 0

    def whole(self) -> Node:
        node = self._sum()
        if self._at != len(self._tokens):
            raise NotAnExpressionError(self._peek().text)
        return node

    def _peek(self) -> _Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else _Token("end", "")

    def _take(self) -> _Token:
        token = self._peek()
        self._at += 1
        return token

    def _is(self, *marks: str) -> bool:
        token = self._peek()
        return token.kind == "mark" and token.text in marks

    def _expect(self, mark: str) -> None:
        if not self._is(mark):
            raise NotAnExpressionError(f"{mark} is missing")
        self._at += 1

    def _sum(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotAnExpressionError("too deep")
        terms = [self._product()]
        while self._is("+", "-"):
            sign = self._take().text
            right = self._product()
            terms.append(right if sign == "+" else Node("negate", (right,)))
        self._depth -= 1
        return _together("add", terms)

    def _product(self) -> Node:
        factors = [self._signed()]
        divisions = 0
        while True:
            if self._is("*"):
                self._at += 1
                factors.append(self._signed())
            elif self._is("/") and divisions < MAX_DEPTH:
                self._at += 1
                divisions += 1
                factors = [Node("divide", (_together("multiply", factors), self._signed()))]
            elif self._starts_factor():
                if self._peek().kind in _NUMERALS and self._tokens[self._at - 1].kind in _NUMERALS:
                    raise NotAnExpressionError("two numbers side by side")
                factors.append(self._power())
            else:
                return _together("multiply", factors)

    def _starts_factor(self) -> bool:
        token = self._peek()
        if token.kind == "mark":
            return token.text in ("(", "[", "{") or (token.text == "|" and not self._bars)
        return token.kind != "end" and token.text not in ("rfloor", "rceil", "deg")

    def _signed(self) -> Node:
        signs = 0
        negative = False
        while self._is("+", "-"):
            negative ^= self._take().text == "-"
            signs += 1
            if signs > 4:
                raise NotAnExpressionError("signs")
        node = self._power()
        return Node("negate", (node,)) if negative else node

    def _power(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotAnExpressionError("too deep")
        node = self._postfix()
        if self._is("^"):
            self._at += 1
            node = Node("power", (node, self._exponent()))
            # A factorial behind a power is one of it; more are behind a bracket.
            if self._is("!", "!!"):
                node = Node(_FACTORIALS[self._take().text], (node,))
        self._depth -= 1
        return node

    def _exponent(self) -> Node:
        if self._is("{"):
            group = self._group("{", "}")
            return Node("power", (group, self._after_caret())) if self._is("^") else group
        if self._is("-", "+"):
            negative = self._take().text == "-"
            node = self._power()
            return Node("negate", (node,)) if negative else node
        return self._power()

    def _after_caret(self) -> Node:
        self._at += 1
        return self._exponent()

    def _postfix(self) -> Node:
        node = self._primary()
        marks = 0
        while self._is("!", "!!") or self._peek().text == "deg":
            marks += 1
            if marks > _MOST_MARKS:
                raise NotAnExpressionError("marks")
            mark = self._take().text
            degree = Node("multiply", (node, Node("pi"), number(Fraction(1, 180))))
            node = Node(_FACTORIALS[mark], (node,)) if mark in _FACTORIALS else degree
        return node

    def _primary(self) -> Node:
        token = self._take()
        if token.kind in _NUMERALS:
            return self._mixed(_numeral(token))
        if token.kind == "word":
            return self._named(_WORDS.get(token.text, token.text), token.text in _WORDS)
        if token.kind == "command":
            return self._named(token.text, True)
        if token.kind == "mark" and token.text in ("(", "[", "{"):
            self._at -= 1
            return self._group(token.text, {"(": ")", "[": "]", "{": "}"}[token.text])
        if token.kind == "mark" and token.text == "|" and not self._bars:
            self._bars += 1
            node = self._sum()
            self._bars -= 1
            self._expect("|")
            return Node("abs", (node,))
        raise NotAnExpressionError(token.text or "the end")

    def _group(self, opening: str, closing: str) -> Node:
        self._expect(opening)
        bars, self._bars = self._bars, 0
        node = self._sum()
        self._bars = bars
        self._expect(closing)
        return node

    def _mixed(self, node: Node) -> Node:
        """A whole number with a fraction of numerals behind it is their sum."""
        is_whole = node.number.denominator == 1 and node.decimals is None
        if not is_whole or self._peek() not in (_Token("command", "frac"), _Token("command", "frac", True)):
            return node
        start = self._at
        self._at += 1
        top, bottom = self._argument(), self._argument()
        if top.kind == bottom.kind == "number" and 0 < top.number < bottom.number:
            return number(node.number + top.number / bottom.number)
        self._at = start
        return node

    def _argument(self) -> Node:
        """Argument of a command: a group in braces, or one character."""
        if self._is("{"):
            return self._group("{", "}")
        token = self._take()
        if token.kind == "number" and token.text.isdigit():
            if len(token.text) > 1:
                self._at -= 1
                self._tokens[self._at] = _Token("number", token.text[1:])
            return number(int(token.text[0]))
        self._at -= 1
        return self._primary()

    def _named(self, name: str, known: bool) -> Node:
        if not known:
            return self._symbol(name)
        if name == "frac":
            return Node("divide", (self._argument(), self._argument()))
        if name == "binom":
            return Node("binomial", (self._argument(), self._argument()))
        if name in ("gcd", "lcm", "max", "min"):
            return Node(name, (self._argument(), self._argument()))
        if name == "sqrt":
            return self._root()
        if name in ("pi", "infty"):
            return Node(name)
        if name in ("lfloor", "lceil"):
            node = self._sum()
            if self._take() not in (_Token("command", "r" + name[1:]), _Token("command", "r" + name[1:], True)):
                raise NotAnExpressionError(name)
            return Node(name[1:], (node,))
        if name in _FUNCTIONS:
            return self._function(name)
        if name in _GREEK:
            return self._symbol(name)
        raise NotAnExpressionError(name)

    def _symbol(self, name: str) -> Node:
        if self._is("_"):
            self._at += 1
            if self._is("{"):
                end = self._at
                while end < len(self._tokens) and self._tokens[end].text != "}":
                    end += 1
                name += "_" + "".join(token.text for token in self._tokens[self._at + 1 : end])
                self._at = end + 1
            else:
                name += "_" + self._take().text
        if name in ("e", "i"):
            return Node(name)
        return Node("symbol", name=name)

    def _root(self) -> Node:
        degree = number(2)
        if self._is("["):
            degree = self._group("[", "]")
        if self._is("{", "("):
            under = self._group("{", "}") if self._is("{") else self._group("(", ")")
        else:
            under = self._primary()
        return Node("root", (under, degree))

    def _function(self, name: str) -> Node:
        base, exponent = None, None
        for _ in range(2):
            if self._is("_") and name == "log":
                self._at += 1
                base = self._argument() if self._is("{") else self._primary()
            elif self._is("^"):
                self._at += 1
                exponent = self._exponent()
        if self._is("(", "{", "["):
            argument = self._power()
        else:
            factors = [self._signed()]
            while self._starts_factor() and not self._is("(", "[", "{") and self._peek().text not in _FUNCTIONS:
                factors.append(self._power())
            argument = _together("multiply", factors)
        if exponent == Node("negate", (number(1),)) and name in ("sin", "cos", "tan"):
            name, exponent = "a" + name, None
        if base is not None:
            node = Node("divide", (Node("ln", (argument,)), Node("ln", (base,))))
        else:
            node = Node(name, (argument,))
        return node if exponent is None else Node("power", (node, exponent))


def _together(kind: str, parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Node(kind, tuple(parts))


def _numeral(token: _Token) -> Node:
    if len(token.text) > MAX_DIGITS:
        raise NotAnExpressionError("a number of too many digits")
    if token.kind == "repeating":
        head, _, tail = token.text.partition("\\")
        return number(_repeating(head, "".join(filter(str.isdigit, tail))))
    if token.kind == "dots":
        whole, _, behind = token.text.partition(".")
        for size in range(1, len(behind) // 2 + 1):
            period = behind[-size:]
            if behind.endswith(period * 2) and (size > 1 or behind.endswith(period * 3)):
                return number(_repeating(f"{whole}.{behind}", period))
        raise NotAnExpressionError("a decimal without an end")
    mantissa, _, exponent = token.text.lower().partition("e")
    if len(exponent) > 5:
        raise NotAnExpressionError("an exponent of too many digits")
    value = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return Node("number", number=value, decimals=decimals if mantissa[-1] != "." and "." in mantissa else None)


def _repeating(head: str, period: str) -> Fraction:
    behind = len(head.partition(".")[2])
    start = Fraction((head.rstrip(".") or "0") if head != "." else "0")
    return start + Fraction(int(period), (10 ** len(period) - 1) * 10**behind)
