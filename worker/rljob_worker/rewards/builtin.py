"""The rewards that a manifest can name, but for `match`. Imported by the scoring processes: keep it light."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from rljob_api.rewards import BUILTIN_REWARDS, argument_faults, missing_arguments
from rljob_worker.errors import UserError


def exact(response: str, label: str) -> float:
    """1 when the response equals the label, white space at both ends aside; else 0."""
    return float(response.strip() == label.strip())


def make_regex(pattern: str, compare: bool | None = None) -> Callable[[str, str | None], float]:
    """The last match of `pattern` in the response: group 1 (the whole match where it has no group) against the label.

    `compare` false scores any match as 1; by default there is a comparison wherever there is a label.
    """
    expression = re.compile(pattern)

    def score(response: str, label: str | None) -> float:
        found = None
        for found in expression.finditer(response):  # noqa: B007
            pass
        if found is None:
            return 0.0
        if compare is False or (compare is None and label is None):
            return 1.0
        if label is None:
            raise ValueError("compare: true needs a label")
        captured = found.group(1) if expression.groups else found.group()
        return float(captured is not None and captured.strip() == label.strip())

    return score


def gsm8k(response: str, label: str, flexible: bool = False) -> float:
    """1 when the number after the response's last `####` is that of the label, else 0.

    The label is a raw answer of GSM8K (`... #### 72`) or the number alone. Numbers are compared as numbers: `1,000`,
    `$1000` and `1000.0` are one. `flexible` takes the number out of markup and words behind `####`, and the response's
    last number where it has no `####`. (GSM8K, arXiv 2110.14168, and verl's `gsm8k` score, strict and flexible.)

    Raises:
        ValueError: the label has no number.
    """
    wanted = gsm8k_number(label)
    _, mark, rest = response.rpartition("####")
    found = _number_at(rest) if mark else None
    if found is None and flexible:
        line = rest[:_ANSWER_CHARACTERS].strip().partition("\n")[0] if mark else response[-_ANSWER_CHARACTERS:]
        numbers = _NUMBER.findall(line.translate(_MINUS_SIGNS))
        found = _number_at(_MARKUP.sub("", line)) if mark else None
        found = _number_at(numbers[-1]) if found is None and numbers else found
    return float(found is not None and found == wanted)


def gsm8k_number(label: str) -> Fraction:
    """The number of a label of `gsm8k`. Raises ValueError where it has none, or is more than a number with its unit."""
    text = label.rpartition("####")[2]
    number = _number_at(text)
    if number is None or not _AFTER_NUMBER.fullmatch(text.strip()[_length_of_number(text) :]):
        raise ValueError(f"the label has no number, after #### or alone: {label[-80:]!r}")
    return number


_ANSWER_CHARACTERS = 1000
_MAX_DIGITS = 64
# Linear, whatever the text is: each character is looked at once.
_NUMBER = re.compile(r"(?<!-)-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_NUMBER_FIRST = re.compile(r"([-+]?) ?[$€£]? ?(-?\d[\d,]*(?:\.\d+)?|-?\.\d+)(?:/(\d+))?")
_MINUS_SIGNS = str.maketrans("−－", "--")
_GOES_ON = re.compile(r" ?\d+/\d| \d{3}(?!\d)|[eE^][+-]?\d|\^")
_MARKUP = re.compile(r"\\(?:boxed|text|mathbf|textbf)\s*\{|[*_`{}()\\]")
_AFTER_NUMBER = re.compile(r"[.%]?[A-Za-z.]*(?:[^\S\n]+[A-Za-z.]+)*")


def _number_at(text: str) -> Fraction | None:
    """The number that a text begins with; None without one, or with one that is too long to be an answer."""
    found = _first_number(text)
    if found is None or len(found[2]) > _MAX_DIGITS or (found[1] and found[2][0] == "-"):
        return None
    below = found[3] or "1"
    if len(below) > _MAX_DIGITS or not int(below):
        return None
    return Fraction(found[1] + found[2].replace(",", "")) / int(below)


def _first_number(text: str) -> re.Match[str] | None:
    """The number that a text begins with; None where what follows makes it another one, as in `3 1/2` and `5e3`."""
    said = text[:_ANSWER_CHARACTERS].lstrip().translate(_MINUS_SIGNS)
    found = _NUMBER_FIRST.match(said)
    return None if found is None or _GOES_ON.match(said, found.end()) else found


def _length_of_number(text: str) -> int:
    found = _first_number(text)
    return 0 if found is None else found.end()


def make_format(
    tags: Sequence[str] = ("think", "answer"), opened: bool = False, rest: bool = False
) -> Callable[[str], float]:
    """1 when the response is `<TAG>text</TAG>` for each tag, in their order and each once; else 0.

    Between and around them there is only white space; with `rest` text follows the last one. With `opened` the first
    opening tag stands in the prompt (the chat templates of reasoning models write it). With [think, answer] it is the
    format reward of DeepSeek-R1 (arXiv 2501.12948). Text is searched, not matched by a pattern: the time is linear.
    """

    def score(response: str) -> float:
        position = 0
        for tag in tags:
            begin, end = f"<{tag}>", f"</{tag}>"
            is_open = opened and tag == tags[0]
            if response.count(begin) != (not is_open) or response.count(end) != 1:
                return 0.0
            start = position if is_open else response.index(begin)
            stop = response.index(end)
            text_at = start if is_open else start + len(begin)
            if response[position:start].strip() or not response[text_at:stop].strip():
                return 0.0
            position = stop + len(end)
        return float(bool(response[position:].strip()) == rest)

    return score


def length_penalty(tokens: int, limit: int, target: int = 0) -> float:
    """-min(1, |tokens - target| / limit): 0 at `target`, -1 where it is missed by `limit` tokens or more.

    With a weight w beside a reward for the right answer it is LCPO-Exact of L1 (arXiv 2503.04697, equation 1) with
    alpha = w / limit, bounded.
    """
    return max(-1.0, -abs(tokens - target) / limit)


def overlong_penalty(tokens: int, limit: int, cache: int) -> float:
    """The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), L_max being `limit` and L_cache `cache`:

    0 up to L_max - L_cache tokens, then ((L_max - L_cache) - tokens) / L_cache down to -1 at L_max, and -1 above.
    (The paper's values: L_max 20480, L_cache 4096.)
    """
    return max(-1.0, min(0.0, ((limit - cache) - tokens) / cache))


def check_args(name: str, args: dict[str, Any]) -> None:
    """UserError when a built-in reward does not take these `args`."""
    for key in missing_arguments(name, args):
        raise UserError(f"reward.args.{key}: {name} needs it; allowed: {BUILTIN_REWARDS[name].arguments[key].allowed}")
    for key, wrong, allowed in argument_faults(name, args):
        raise UserError(f"reward.args.{key}: {wrong}; allowed: {allowed}")
