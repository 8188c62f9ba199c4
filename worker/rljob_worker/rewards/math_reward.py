"""The `math` reward: whether a response's final answer is the label's."""

from __future__ import annotations

import re
from functools import lru_cache

from rljob_worker.rewards.answers.characters import clean, closing_brace
from rljob_worker.rewards.answers.comparison import same
from rljob_worker.rewards.answers.final import final_answer
from rljob_worker.rewards.answers.reading import MAX_CHARACTERS, Answer, read
from rljob_worker.rewards.answers.values import Budget, NoValueError


def math(response: str, label: str) -> float:
    """1 when the response's final answer is the label, which is LaTeX, a number or a word, else 0.

    Linear in the response, and bounded in what an answer may ask for: no huge power and no nesting holds it up.

    Raises:
        ValueError: the label says nothing that an answer can be compared with.
    """
    wanted, spelled = read_label(label)
    said = final_answer(response)
    if said is None:
        return 0.0
    if _spelled(said) == spelled:
        return 1.0
    budget = Budget()
    return float(any(_is_same(one, other, budget) for one in wanted for other in read(said, response=True)))


_MAPPING = re.compile(r"""\s*\{\s*(?:"[^"]{1,60}"|'[^']{1,60}')\s*:""")
_MISSING = ("nan", "NaN", "null", "NULL", "<NA>")
_LOST_ESCAPE = re.compile(r"[\f\b\a\v](?=[a-zA-Z])")


@lru_cache(maxsize=1024)
def read_label(label: str) -> tuple[list[Answer], str]:
    """The readings of a label, and how it is written. Raises ValueError, which says what is wrong with it."""
    shown = f"{label[:60]!r}{'...' if len(label) > 60 else ''}"
    if len(label) > 16 * MAX_CHARACTERS:
        raise ValueError(f"the label is longer than {16 * MAX_CHARACTERS} characters: {shown}")
    if escape := _LOST_ESCAPE.search(label):
        meant = {"\f": "\\f", "\b": "\\b", "\a": "\\a", "\v": "\\v"}[escape[0]]
        raise ValueError(
            f"the label has the character {escape[0]!r}, which was {meant} before it was read as an escape: {shown}"
        )
    if _MAPPING.match(label):
        raise ValueError(
            f"the label is a mapping, not the answer: {shown}; name the answer's field (data.labelKey: COLUMN.FIELD)"
        )
    if label.strip() in _MISSING:
        raise ValueError(f"the label is {label.strip()}, as where a value is missing")
    text = label.rpartition("####")[2] if "####" in label else label
    if re.search(r"\\(?:boxed|fbox)\s*\{", text):
        said = final_answer(text)
        if said is None:
            raise ValueError(f"the label has a box that is not closed: {shown}")
        text = said
    elif re.search(r"\banswer(?: is|\s*(?:\*\*)?:)|答案|<answer>", text, re.IGNORECASE):
        text = final_answer(text) or text
    if not _closed(text):
        raise ValueError(f"the braces of the label do not match: {shown}")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"the answer in the label is longer than {MAX_CHARACTERS} characters: {shown}")
    readings = read(text)
    spelled = _spelled(text)
    if not readings or not re.search(r"[^\W_]|\\[{a-zA-Z]|[^\x00-\x7f]", spelled):
        raise ValueError(f"the label has no answer: {shown}")
    return readings, spelled


def _is_same(label: Answer, answer: Answer, budget: Budget) -> bool:
    try:
        return same(label, answer, budget)
    except NoValueError:
        return False


def _spelled(text: str) -> str:
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", clean(text[: MAX_CHARACTERS + 1]))
    text = re.sub(r"([\^_]) ?([a-zA-Z]|\d(?!\d))", r"\1{\2}", text)
    return re.sub(r"\s+", "", text).rstrip(".")


def _closed(text: str) -> bool:
    return closing_brace("{" + text + "}", 1) == len(text) + 1
