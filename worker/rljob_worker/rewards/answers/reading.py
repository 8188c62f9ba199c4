"""Reading an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljob_worker.rewards.answers.characters import clean, unwrap
from rljob_worker.rewards.answers.expression import NotAnExpressionError, number, parse
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
from rljob_worker.rewards.answers.quantities import NUMBER_WORDS, balanced, compound, in_words, quantity, value
from rljob_worker.rewards.answers.values import has_decimals

MAX_CHARACTERS = 4000
MAX_ITEMS = 60
_MAX_NESTING = 12


_PHRASES = {
    "no solution": "no solution|no solutions|no real solution|no real solutions|no such solution|none|nosolution|"
    "empty set|the empty set|there is no solution|there are no solutions|无解|方程无解|没有解|无实数解|无实数根|空集|"
    "no roots|no real roots|"
    r"\emptyset|\{\}|\{ \}|null set",
    "does not exist": "does not exist|dne|doesn't exist|the limit does not exist|limit does not exist|不存在",
    "undefined": "undefined|not defined|无定义",
    "all real numbers": "all real numbers|all reals|all real values|全体实数|任意实数|实数集|一切实数",
    "infinitely many": "infinitely many|infinitely many solutions|infinite|无穷多|无数|无数个|无穷多个",
    "integers": "all integers|integers|the integers|any integer|整数|全体整数|所有整数",
    "positive integers": "all positive integers|positive integers|正整数|全体正整数",
    "rational numbers": "all rational numbers|rational numbers|rationals|有理数",
    "yes": "yes|是|是的", "no": "no|否|不是", "true": "true|正确|对", "false": "false|错误|错",
}  # fmt: skip
_NUMBER_SETS = {
    "all real numbers": r"\mathbb{R} (-\infty,\infty) (-\infty,+\infty)", "integers": r"\mathbb{Z}",
    "positive integers": r"\mathbb{Z}^+ \mathbb{Z}_+ \mathbb{Z}_{>0} \mathbb{N}^+ \mathbb{N}_+ \mathbb{N}^*",
    "rational numbers": r"\mathbb{Q}",
}  # fmt: skip
_SETS = {spelling: name for name, spellings in _NUMBER_SETS.items() for spelling in spellings.split()}
_MEANINGS = {phrase: name for name, phrases in _PHRASES.items() for phrase in phrases.split("|")}
_POINTS_OF_THOUSANDS = re.compile(r"^-?\d{1,3}(?:\.\d{3}){2,}$")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_EUROPEAN = re.compile(r"^(-?)(\d{1,3}(?:\.\d{3})+|\d+),(\d+)(?=$|\D)")
_NAME = re.compile(
    r"^\\frac\{d[a-z]?(?:\^\{?\d\}?[a-z]?)?\}\{d[a-z](?:\^\{?\d\}?)?\}$|"
    r"^(?:\\[a-zA-Z]+ ?|[A-Za-z])(?:\^\{-1\})?'*(?:_(?:\{[^{}]*\}|\w))?(?: ?\([A-Za-z0-9, ]*\))?$|"
    r"^(?:\\Pr|P|E|\\mathbb\{[PE]\}) ?(?:\[.*\]|\(.*\))$|"
    r"^(?:[\w ]|\\text\{[^{}]*\})*(?:[A-Za-z]{2}|\\text|[^\W\da-zA-Z_])(?:[\w ]|\\text\{[^{}]*\})*$"
)
_ENVIRONMENT = re.compile(
    r"^(\(|\[|\\\{|\|)? ?\\begin ?\{([a-zA-Z]*matrix|array|cases|aligned|align\*?)\}(?:\[[^\]]*\])? ?(\{[lcr| ]*\})?"
    r"(.*)\\end ?\{\2\} ?(\)|\]|\\\}|\|)?(\^ ?\{? ?(?:T|\\top|\\text\{T\}) ?\}?)?$"
)
_NUMERAL = re.compile(
    r"^(?:\(|\\text\{)? ?([0-9][0-9A-Fa-f ]*|[A-F][0-9A-F]*[0-9][0-9A-F]*|[A-F]{2,}) ?[)}]? ?_ ?"
    r"(?:\{ ?(?:\\text\{|\()? ?(\d+|[a-z]+) ?\)?\}?(?:\\text\{)? ?\}?|(\d+))$"
)
_INTEGERS = r"(?:\\mathbb ?\{? ?[ZN] ?\}?|[ZN])(?:(?:\^|_)\{?[+*0]\}?)?"
_BOUND = re.compile(
    r",? ?\(? ?(?:\\text\{ ?,? ?(?:where|for|with|for all|for any|for some) ?\})? ?([a-zA-Z]) ?\\in ?"
    rf"{_INTEGERS} ?\)?$|"
    r",? ?\(? ?(?:\\text\{ ?,? ?(?:where|for|with|and)? ?\})? ?([a-z]) ?\\text\{ ?is any? integer ?\} ?\)?$|"
    r",? ?\\text\{ ?,? ?for (?:any|all|some|every) integers? ?\} ?([a-z])$"
)
"""Behind an answer: its parameter, which is any integer."""
_FOR_ALL = re.compile(r",? ?\\text\{ ?,? ?for (?:all|any|every)(?: [^{}]{0,40})?\}(?! integers?)[^,;]{0,40}$")
"""Behind a function: where it has that value."""
_LETTERS = re.compile(r"[A-J]{2,6}")
_CHOICE = re.compile(
    r"^(?:option |choice |\\text\{(?:option |choice )?\(?)?\(?\b([A-J])\b ?\)?(?:\*\*)?(?:[.:)}]+|$) ?(.*)$",
    re.IGNORECASE,
)
_DATE = re.compile(r"\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}/\d{1,2}/\d{4}")
_FEET = re.compile(r"(\d+) ?' ?(\d+(?:\.\d+)?) ?(?:\"|'')")
_RELATION = re.compile(r"\\(?:le|ge|ne|in|approx|equiv|cong|sim)(?![a-zA-Z])|<=|>=|!=|[<>=]")
_FLIPPED = {"<=": r"\le", ">=": r"\ge", "!=": r"\ne"}


def read(text: str, response: bool = False) -> list[Answer]:
    """The readings of an answer, the likeliest first; none of one that says nothing.

    Args:
        text: the answer alone, as in a box.
        response: whether it was written by a model, which may mean a decimal by `3,5`.
    """
    if len(text) > MAX_CHARACTERS:
        return []
    text = unwrap(clean(text).removeprefix("="))
    if not text:
        return []
    readings: list[Answer] = []
    for spelling in (one for said in _with_parameter(text) for one in _spellings(said, response)):
        for answer in _read_choices(spelling):
            if answer not in readings:
                readings.append(answer)
    return readings


def _spellings(text: str, response: bool) -> Iterator[str]:
    """The text with what commas may mean between digits."""
    if _POINTS_OF_THOUSANDS.match(text):
        text = text.replace(".", "")
    european = _EUROPEAN.match(text)
    if "," in text and european and ("." in european[2] or (response and len(european[3]) != 3)):
        yield f"{european[1]}{european[2].replace('.', '')}.{european[3]}{text[european.end() :]}"
    if not re.search(r"[(\[{]", text) or not re.match(r"^[(\[]|^\\\{", text):
        merged = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
        if merged != text:
            yield merged
    yield text


def _with_parameter(text: str) -> Iterator[str]:
    """The text without what says that its parameter is any integer: as it was named, and as every other one is."""
    text = _FOR_ALL.sub("", text) or text
    found = _BOUND.search(text)
    head = "" if found is None else text[: found.start()].strip()
    name = "" if found is None else next(filter(None, found.groups()))
    alone = rf"(?<![a-zA-Z\\]){name}(?![a-zA-Z])"
    if not name or head == name or not re.search(alone, head):
        yield text
        return
    yield head
    yield re.sub(alone, "k", head)


def _read_choices(text: str) -> Iterator[Answer]:
    choice = _CHOICE.match(re.sub(r"^(\(?)\\text\{ ?(\(?[A-J]\)?[.:]?) ?\}", r"\1\2", text))
    if choice is not None and (choice[2] or len(text) > 1):
        yield Words(choice[1].upper())
        if choice[2]:
            yield _read(unwrap(choice[2]))
    yield from _ambiguous(text)
    if _LETTERS.fullmatch(text) and list(text) == sorted(set(text)):
        yield Unordered(tuple(map(_read, text)), False)


def _ambiguous(text: str) -> Iterator[Answer]:
    answer = _read(text)
    yield answer
    if isinstance(answer, Value) and answer.unit is None and re.search(r"[\d}] ?[A-Za-zμΩ]", text):
        found = quantity(text, spaced=re.search(r"[\d}] [A-Za-zμΩ]", text) is None)
        if found is not None:
            yield found


def _read(text: str, depth: int = 0) -> Answer:
    text = unwrap(text)
    if depth > _MAX_NESTING:
        return Words(text)
    for reader in (_phrase, _environment, _numeral, _compound, _several, _plus_minus, _bracketed, _sets, _related):
        found = reader(text, depth)
        if found is not None:
            return found
    return _ratio(text, depth) or value(text) or Words(plain_words(text))


def plain_words(text: str) -> str:
    """Text without its commands and marks, in lower case where it is words."""
    stripped = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    if re.search(r"\\[a-zA-Z]|[\^_=<>+/|]", stripped):
        return re.sub(r"\s+", "", stripped)
    words = re.findall(r"[^\W_]+", re.sub(r"(?<![A-Za-z])([ap])\. ?m\b\.?", r"\1m", stripped))
    return " ".join(words).lower() if len("".join(words)) > 1 else "".join(words)


def _phrase(text: str, depth: int) -> Answer | None:
    words = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip(" .!。").lower()
    if words in _MEANINGS:
        return Words(_MEANINGS[words])
    if (said := in_words(words)) is not None:
        return Value(number(said))
    if _DATE.fullmatch(text):
        return Words(text)
    name = _SETS.get(re.sub(r" |\{(?=[+*]\})|(?<=[+*])\}", "", text))
    return None if name is None else Words(name)


def _environment(text: str, depth: int) -> Answer | None:
    found = _ENVIRONMENT.match(text)
    if found is None:
        return None
    _, name, _, content, _, transposed = found.groups()
    lines = [line for line in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr(?![a-zA-Z])", content) if line.strip()]
    if name in ("cases", "aligned", "align", "align*") or (found[1] == r"\{" and found[5] is None):
        return Unordered(tuple(_line(line, depth + 1) for line in lines[:MAX_ITEMS]), False)
    if len(lines) == 1 and "&" not in lines[0]:
        return _read(lines[0], depth + 1)
    rows = [[_read(cell, depth + 1) for cell in line.split("&")[:MAX_ITEMS]] for line in lines[:MAX_ITEMS]]
    if transposed and len({len(row) for row in rows}) == 1:
        rows = [list(column) for column in zip(*rows, strict=True)]
    return Matrix(tuple(map(tuple, rows)), determinant=name == "vmatrix" or (name == "array" and found[1] == "|"))


def _line(text: str, depth: int) -> Answer:
    """A line of cases: a value with the condition under which it holds, or an equation."""
    value_of, mark, condition = text.partition("&")
    condition = re.sub(r"^ ?\\text\{ ?(?:if|for|when) ?\} ?", "", condition).strip()
    if not mark or not condition or "&" in condition or re.match(r"[=<>]|\\(?:le|ge|ne)\b", condition):
        return _read(text.replace("&", " "), depth)
    return Ordered("(", (_read(value_of.strip().rstrip(","), depth), _read(condition, depth)), ")")


def _numeral(text: str, depth: int) -> Answer | None:
    found = _NUMERAL.match(text)
    if found is None:
        return None
    written = found[2] or found[3]
    base = int(written) if written.isdigit() else NUMBER_WORDS.get(written, 0)
    digits = found[1].replace(" ", "").upper()
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return Numeral(digits.lstrip("0") or "0", base)


def _compound(text: str, depth: int) -> Answer | None:
    feet = _FEET.fullmatch(text)
    return compound(text if feet is None else f"{feet[1]} ft {feet[2]} in")


_BRACKET = re.compile(r"(\\\{|[{(\[]|\\langle|\\begin\b)|\\\}|[})\]]|\\rangle|\\end\b")


def split(text: str, separators: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts of a text between separators outside all brackets, and those separators."""
    parts, found_separators = [], []
    depth = start = position = 0
    if separators.search(text) is None:
        return [text], []
    while position < len(text):
        bracket = _BRACKET.match(text, position)
        if bracket is not None:
            depth += 1 if bracket[1] else -1
            position = bracket.end()
            continue
        separator = separators.match(text, position) if depth == 0 else None
        if separator is not None and separator.end() > position:
            parts.append(text[start:position])
            found_separators.append(separator[0])
            start = position = separator.end()
            continue
        position += 2 if text[position] == "\\" and not text[position + 1 : position + 2].isalpha() else 1
    return [*parts, text[start:]], found_separators


_LIST = re.compile(
    r",? ?(?<![A-Za-z])(?:and|or)(?![A-Za-z])|,? ?\\(?:lor|land)(?![a-zA-Z])|,? ?[或和且]|"
    r",(?:\\text\{ ?(?:and|or) ?\})?|;|\\text\{ ?,? ?(?:and|or) ?\}|"
    r"\\\\"
)
_CUP = re.compile(r"\\(?:cup|bigcup)(?![a-zA-Z])|(?<=[\])]) ?U ?(?=[\[(])")
_MINUS = re.compile(r"\\(?:setminus|backslash)(?![a-zA-Z])|(?<=[\])}]) ?[-\\] ?(?=\\\{)")


def _several(text: str, depth: int) -> Answer | None:
    parts, separators = split(text, _LIST)
    if len(parts) == 1 or len(parts) > MAX_ITEMS:
        return None
    if not all(part.strip() for part in parts):
        return None
    joint = "or" if any(re.search(r"or|或", one) for one in separators) else ","
    if joint == "," and any(re.search(r"and|且", one) for one in separators):
        joint = "and"
    return Unordered(tuple(_spread([_read(part, depth + 1) for part in parts])), False, joint)


def _spread(items: list[Answer]) -> Iterator[Answer]:
    """Lists in a list, such as a plus-minus, one by one."""
    for item in items:
        if isinstance(item, Unordered) and not item.braces:
            yield from item.items
        elif isinstance(item, Assigned) and isinstance(item.to, Unordered) and not item.to.braces:
            yield from (Assigned(item.name, inner) for inner in item.to.items)
        else:
            yield item


def _plus_minus(text: str, depth: int) -> Answer | None:
    if not re.search(r"\\(?:pm|mp)(?![a-zA-Z])|\+/?-(?=[\d\\ ])", text) or re.search(r"\\begin", text):
        return None
    plus = re.sub(r"\\pm(?![a-zA-Z])|\+/?-", "+", re.sub(r"\\mp(?![a-zA-Z])", "-", text))
    minus = re.sub(r"\\pm(?![a-zA-Z])|\+/?-", "-", re.sub(r"\\mp(?![a-zA-Z])", "+", text))
    items = tuple(_spread([_read(plus, depth + 1), _read(minus, depth + 1)]))
    return Unordered(items, False, "or")


_PAIRS = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle"}
_BRACKETED = re.compile(r"^(\(|\[|\]|\\\{|\\langle) ?(.*?) ?(\)|\]|\[|\\\}|\\rangle)$")


def _bracketed(text: str, depth: int) -> Answer | None:
    found = _BRACKETED.match(text)
    if found is None:
        return None
    opening, content, closing = found.groups()
    is_open = (opening in ("[", "(") and closing == "[") or (opening == "]" and closing == "]")
    if is_open and not re.fullmatch(r"[^\[\](){},;]*[,;][^\[\](){},;]*", content):
        return None
    opening, closing = opening.replace("]", "("), closing.replace("[", ")")
    parts, _ = split(content, re.compile(r"[,;]"))
    if any(not balanced(part) for part in parts) or len(parts) > MAX_ITEMS:
        return None
    if opening == r"\{" and closing == r"\}":
        if re.search(r"\\mid|\||:", content):
            return _built(content, depth)
        return Unordered(tuple(_spread([_read(part, depth + 1) for part in parts])), True)
    if len(parts) == 1:
        return _read(content, depth + 1) if _PAIRS.get(opening) == closing else None
    if not all(part.strip() for part in parts) or r"\{" in (opening, closing):
        return None
    return Ordered(opening, tuple(_read(part, depth + 1) for part in parts), closing)


_BUILT = re.compile(r"^[A-Za-z](?: ?\\in ?\\(?:mathbb|text) ?\{ ?R ?\})? ?(?:\\mid|\||:) ?(.*)$")


def _built(content: str, depth: int) -> Answer | None:
    """The condition of a set that is given by one, where it is made of inequalities."""
    found = _BUILT.match(content)
    condition = None if found is None else _read(found[1], depth + 1)
    parts = condition.items if isinstance(condition, Unordered) else (condition,)
    return condition if all(isinstance(part, (Relation, Assigned)) for part in parts) else None


def _sets(text: str, depth: int) -> Answer | None:
    if len(split(text, re.compile("="))[0]) > 1:
        return None
    for separator, form in ((_CUP, Union), (_MINUS, None)):
        parts, _ = split(text, separator)
        if len(parts) > 1 and len(parts) <= MAX_ITEMS and all(part.strip() for part in parts):
            items = tuple(_read(part, depth + 1) for part in parts)
            if form is not None:
                return form(items)
            return Without(items[0], items[1]) if len(items) == 2 else None
    return None


def _related(text: str, depth: int) -> Answer | None:
    sides, signs = split(text, _RELATION)
    if len(sides) == 1 or len(sides) > MAX_ITEMS or not all(side.strip() for side in sides):
        return None
    sides = [unwrap(side) for side in sides]
    signs = [_FLIPPED.get(sign, sign) for sign in signs]
    if all(sign == r"\in" for sign in signs):
        return _read(sides[-1], depth + 1)
    is_name = _NAME.match(sides[0]) is not None and sides[0] not in (r"\pi", "e", "i", r"\infty")
    if is_name and signs == [r"\equiv"]:
        return Assigned(re.sub(r"\s", "", sides[0]), _read(sides[1], depth + 1))
    if is_name and signs[0] in ("=", r"\approx", r"\in") and all(sign in ("=", r"\approx") for sign in signs[1:]):
        exact = signs.index(r"\approx", 1) if r"\approx" in signs[1:] else len(signs)
        return Assigned(re.sub(r"\s", "", sides[0]), _read(sides[exact], depth + 1))
    if all(sign in ("=", r"\approx") for sign in signs):
        return _equation(sides, signs, depth)
    try:
        return Relation(tuple(parse(side) for side in sides), tuple(signs))
    except NotAnExpressionError:
        return None


def _equation(sides: list[str], signs: list[str], depth: int) -> Answer | None:
    if len(sides) == 2 and signs[0] == "=" and _NAME.match(sides[1]) and sides[1] not in (r"\pi", "e", "i"):
        return Assigned(re.sub(r"\s", "", sides[1]), _read(sides[0], depth + 1))
    if sides[0].startswith("(") and re.fullmatch(r"\([A-Za-z_0-9{}, ]*\)", sides[0]):
        return _read(sides[-1], depth + 1)
    try:
        nodes = [parse(side) for side in sides]
    except NotAnExpressionError:
        if len(sides) != 2 or not re.match(r"\\[a-zA-Z]|[A-Za-z|]", sides[0]):
            return None
        return Assigned(re.sub(r"\s", "", sides[0]), _read(sides[1], depth + 1))
    if any(node.symbols() for node in nodes):
        return Relation(tuple(nodes[:2]), ("=",)) if len(nodes) == 2 else _read(sides[-1], depth + 1)
    exact = next((node for node in range(len(nodes)) if not has_decimals(nodes[node])), 0)
    return _read(sides[exact] if r"\approx" in signs else sides[-1], depth + 1)


def _ratio(text: str, depth: int) -> Answer | None:
    parts, _ = split(text, re.compile(":"))
    of_words = re.fullmatch(r"(\d+) ?(?:\\text\{ ?)?(?:to|out of) ?\}? ?(\d+)", text)
    parts = list(of_words.groups()) if of_words else parts
    if not 1 < len(parts) < 6:
        return None
    items = [value(unwrap(part)) for part in parts]
    if any(item is None or item.node.symbols() for item in items[:-1]):
        return None
    found = re.fullmatch(r"(\d+) ?(?:\\text\{)? ?([ap])\.?m\.? ?\}?", parts[-1].strip(), re.I)
    last = Words(f"{found[1]}") if found else items[-1]
    if last is None:
        return None
    head = tuple(item for item in items[:-1] if item is not None)
    if found is not None:
        return Ratio((*head, Value(parse(found[1])), Words(found[2].lower() + "m")))
    return Ratio((*head, last))
