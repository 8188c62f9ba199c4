"""The final answer of a response: what it says last where answers stand.

An answer stands in a box, between answer tags, behind `####`, behind words such as "the answer is", or at the end of
the last sentence. A number anywhere else is none, and neither is what was only thought.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rljob_worker.rewards.answers.characters import closing_brace

_TAIL = 20_000
"""Characters at a response's end in which words and sentences are looked at."""
_LINE = 1_000
_FEW_WORDS = 3
_BOX = re.compile(r"\\(?:boxed|fbox|framebox|bbox)(?![a-zA-Z])\s*(?:\[[^\]\n]{0,40}\]\s*)?")
_ARGUMENT = re.compile(r"(?:\\[a-zA-Z]+\s*(?:\{[^{}]*\})*|[^\s$\\])+")
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;.]|\\[\])(\[,;!]|\\quad|\\qquad|\\text\{|\}|and\b|or\b|\bis\b|和|或|与|[a-zA-Z](?:_\{?\d\}?)?\s*=)*"
)
_JOINT = re.compile(r"\b(?:and|or)\b|,|;|和|或|与")
_OPENING, _CLOSING = (re.compile(tag, re.IGNORECASE) for tag in ("<answer>", "</answer>"))
_END_TOKENS = re.compile(r"(?:\s|<\|[^|<>]{1,40}\|>|</s>|<eos>|<end_of_turn>)+$")
_HEADING = r"(?:final\s+)?(?:answers?|ans|solution|result|option|choice)"
_ANCHOR = re.compile(
    rf"(?:\b{_HEADING}\b[^\S\n]*(?:[*_]{{1,2}})?[^\S\n]*(?:to\b[^.\n:]{{0,80}}|for\b[^.\n:]{{0,80}}|of\b[^.\n:]{{0,80}})?"
    r"(?:(?:is|are|was|=|:|：|equals|should be|would be|must be|comes? out (?:to|as))[^\S\n]*"
    r"(?:[*_]{1,2})?[^\S\n]*:?)+)"
    r"|(?:最终)?答案[^\S\n]*(?:[*_]{1,2})?[^\S\n]*(?:应该?)?(?:是|为|[:：=])[^\S\n]*[:：]?"
    r"|【答案】|(?:(?:故|应|所以)\s*|^[^\S\n]*)选(?:择)?[:：]?"
    r"|####|^[#*_ \t]*(?:final answer|answer|最终答案|答案)[*_:： \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_ANSWERS_NOTHING = re.compile(
    r"(?:therefore|thus|hence|so|then)?[,\s]*(?:in(?:side)? (?:the|a) box|correct|right|wrong|incorrect|below|above|"
    r"given|shown|obtained|found|as follows|clear|known|unique|simple|obvious|following|expected|the following|what|"
    r"that|verified|confirmed|reasonable|consistent|likely|indeed|boxed|therefore|thus|a |an |to |by |when |if |"
    r"because )\b",
    re.IGNORECASE,
)
_NEGATION = re.compile(r"(?:definitely |certainly |clearly )?(?:not|no longer|neither|never|isn't|不是)\b", re.I)
_SENTENCE_END = re.compile(r"(?<!\d)[.!?。！？](?=\s|$|\*)|[.](?=\s|$)|[。！？]")
_MATH = re.compile(
    r"\$\$(.{1,600}?)\$\$|(?<!\\)\$(?!\d[^$\n]*\s\$\d)(.{1,600}?)(?<!\\)\$|\\\((.{1,600}?)\\\)|\\\[(.{1,600}?)\\\]",
    re.DOTALL,
)
_REASON = re.compile(
    r"[,;]?\s+(?:because|since|as|where|which|so|when|for|by|after|but)\s|,\s(?:not|rather than)\s|\s\(",
    re.IGNORECASE,
)
_CONCLUDES = re.compile(
    r"(?:\b(?:is|are|equals|get|obtain|have|gives?|yields?|costs?|makes?|so|thus|hence|therefore)|[=:：]|所以|因此|为|是|等于|得)\s*"
    r"(?:exactly |about |approximately )?$",
    re.IGNORECASE,
)
_IS_THE_ANSWER = re.compile(r" is (?:the|our|my) (?:final |correct |right )?answer$", re.IGNORECASE)
_ASIDE = re.compile(r"(?:\b(?:at|when|for|where|if|since|because)|当|此时|其中)\s*(?:\w+\s+)?$", re.IGNORECASE)
"""Before a formula that says where a value is taken, or why."""
_DOUBTS = re.compile(
    r"\b(?:if|maybe|perhaps|suppose|assume|assuming|let|try|guess|might|could|not|unsure|unless|wrong|whether)\b|不是|假设|如果",
    re.IGNORECASE,
)
_LAST_NUMBER = re.compile(r"(?<![\w.,/^])[-−]?[$€£]?\d[\d,]*(?:\.\d+)?(?:/\d+)?\s?%?(?: [a-z]{2,12}){0,2}$")


@dataclass(frozen=True, slots=True)
class _Mark:
    start: int
    end: int
    text: str
    """The answer; empty where it was begun and not ended."""
    in_words: bool = False


def final_answer(response: str) -> str | None:
    """The answer that a response ends with, as it is written; None where it gives none."""
    text = _after_thinking(response)
    if text is None:
        return None
    text = text[: len(text) - len(text[-_LINE:]) + len(_END_TOKENS.sub("", text[-_LINE:]))]
    marks = [mark for mark in _boxes(text) if mark is not None]
    tag = _last_tag(text)
    if tag is not None:
        inside = [mark for mark in marks if tag.start <= mark.start < tag.end]
        behind = [mark for mark in marks if mark.start >= tag.end]
        if not behind:
            return _joined(text, inside) if inside else _of_phrase(tag.text)
        marks = behind
    words = _last_in_words(text, max((mark.end for mark in marks), default=0))
    if words is not None:
        return words
    if marks:
        return _joined(text, marks)
    return _conclusion(text[-4 * _LINE :])


def _after_thinking(text: str) -> str | None:
    """Text after the thinking; None where that never ends."""
    _, closed, rest = text.rpartition("</think>")
    if "<think>" in rest:
        return None
    return rest if closed else text


def _boxes(text: str) -> Iterator[_Mark]:
    position = 0
    while (found := _BOX.search(text, position)) is not None:
        start = found.end()
        if text[start : start + 1] == "{":
            end = closing_brace(text, start + 1)
            if end is None:
                yield _Mark(found.start(), len(text), "")
                return
            if text[start + 1 : end].strip(" .\u2026"):
                yield _Mark(found.start(), end + 1, text[start + 1 : end])
            position = end + 1
        else:
            argument = _ARGUMENT.match(text, start)
            position = max(start, argument.end() if argument else start)
            if argument is not None and argument[0].strip("().,:;`*'\""):
                yield _Mark(found.start(), position, argument[0])


def _joined(text: str, marks: list[_Mark]) -> str | None:
    """The last box, with those before it that it continues: `\\boxed{1}` and `\\boxed{2}`."""
    last = len(marks) - 1
    parts = [marks[last].text]
    while last > 0:
        between = text[marks[last - 1].end : marks[last].start]
        if len(between) > 40 or not _JOINT.search(between) or not _BETWEEN_BOXES.fullmatch(between):
            break
        last -= 1
        parts.insert(0, marks[last].text)
    if not all(parts):
        return None
    if len(set(parts)) == 1:
        return parts[0]
    return " , ".join(parts)


def _last_tag(text: str) -> _Mark | None:
    opening = None
    for opening in _OPENING.finditer(text):  # noqa: B007
        pass
    if opening is None:
        return None
    closing = _CLOSING.search(text, opening.end())
    end = len(text) if closing is None else closing.start()
    return _Mark(opening.start(), end, text[opening.end() : end])


def _last_in_words(text: str, after: int) -> str | None:
    """Behind the last words that announce an answer, where they stand after all boxes and announce a value."""
    begin = max(after, len(text) - _TAIL)
    for found in reversed(list(_ANCHOR.finditer(text, begin))):
        rest = text[found.end() :]
        line = _first_line(rest)
        if _NEGATION.match(line):
            return ""
        if not line or _ANSWERS_NOTHING.match(line):
            continue
        if after and not re.match(r"[\d$\\(\[+-]", line):
            continue
        return _of_line(line)
    return None


def _first_line(text: str) -> str:
    """The first line that says something, or all of a formula that spans lines."""
    text = text[: 4 * _LINE].lstrip(" \t\r\n*_:：=#")
    display = re.match(r"(\\\[.*?\\\]|\$\$.*?\$\$|\\begin\{(\w+\*?)\}.*?\\end\{\2\})", text, re.DOTALL)
    line = display[0] if display else text.partition("\n")[0]
    return line[:_LINE].strip().rstrip("*_ ").rstrip(" ." if line.rstrip().endswith("*.") else "").rstrip("*_ ")


def _of_line(line: str) -> str:
    """The answer that a line begins with: up to the end of the sentence, without a reason that follows."""
    math = list(_MATH.finditer(line))
    if math and not line[: math[0].start()].strip("*_ "):
        end = math[0].end()
        for following in math[1:]:
            if not re.fullmatch(r"\s*,?\s*(?:and|or|,|和|或)?\s*", line[end : following.start()]):
                break
            end = following.end()
        rest = line[end:]
        unit = re.match(r"\s*(?:\\?%|°|(?:[a-zA-Z²³/^]++\s?+){1,4}+)(?=[.,;]|\s*$)", rest)
        return line[:end] + (unit[0] if unit else "")
    stop = _SENTENCE_END.search(line)
    sentence = line[: stop.start()] if stop else line
    reason = _REASON.search(sentence)
    return (sentence[: reason.start()] if reason and reason.start() else sentence).strip()


def _of_phrase(text: str) -> str:
    """Answer between answer tags: the answer alone, or a phrase around it."""
    words = _last_in_words(text, 0)
    if words is not None:
        return words
    stripped = text.strip()
    if len(stripped.split()) > 2 and (said := _conclusion(stripped)) is not None:
        return said
    return stripped


def _conclusion(text: str) -> str | None:
    """Conclusion of a response that marks no answer: its whole text where that is short, or the end of its last
    sentence."""
    text = text.strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or lines[-1].endswith(("?", "？")):
        return None
    words = len(re.findall(r"[^\W\d_]{2,}", _MATH.sub("", text)))
    if len(lines) == 1 and not words:
        return text
    said = _end_of_sentence(lines[-1] if not text.endswith((r"\]", "$$")) else text)
    if said is None and len(lines) == 1 and words <= _FEW_WORDS and not _MATH.search(text):
        return text
    return said


def _end_of_sentence(text: str) -> str | None:
    """Conclusion of the last sentence: a formula, or a number after a word such as "is"."""
    last = _last_sentence(text)
    if _DOUBTS.search(_MATH.sub("", last)):
        return None
    end = _IS_THE_ANSWER.sub("", last.rstrip(" .*。!`"))
    math = list(_MATH.finditer(end))
    if math and not end[math[-1].end() :].strip(" *"):
        said = math[-1]
        if _ASIDE.search(end[: said.start()]):
            said = next((one for one in reversed(math[:-1]) if _CONCLUDES.search(end[: one.start()])), said)
        return next(group for group in said.groups() if group)
    number = _LAST_NUMBER.search(end)
    if number is None:
        return None
    before = end[: number.start()].strip("* ")
    return number[0] if not before or _CONCLUDES.search(before) else None


def _last_sentence(text: str) -> str:
    text = text[-4 * _LINE :].rstrip()
    ends = [found.end() for found in _SENTENCE_END.finditer(text, 0, max(0, len(text) - 2))]
    formulas = [(found.start(), found.end()) for found in _MATH.finditer(text)]
    ends = [end for end in ends if not any(start < end < stop for start, stop in formulas)]
    return text[ends[-1] :] if ends else text
