"""The rewards that a manifest can name, but for `match`. Imported by the scoring processes: keep it light."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
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


def make_math(timeout_seconds: float) -> Callable[[str, str], float]:
    """1 when math-verify finds the response's final answer equal to the label (LaTeX or a number), else 0.

    An answer that math-verify cannot check in its own time limits (a sixth of `timeout_seconds` for each parse and
    comparison, 1 to 5 s) is wrong, as in math-verify itself: the policy must not be able to end the job by writing a
    huge power. Those limits are signals: call it in a process's main thread.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    limit = max(1, min(5, int(timeout_seconds // 6)))
    # The first use builds parsers for seconds, which must not count against the first answers.
    verify(parse("$\\frac{1}{2}$", parsing_timeout=None), parse("0.5", parsing_timeout=None), timeout_seconds=None)

    @lru_cache(maxsize=1024)
    def parse_label(label: str) -> list[Any]:
        text = label if "$" in label or "\\boxed" in label else f"\\boxed{{{label}}}"
        parsed: list[Any] = parse(text, parsing_timeout=None)
        if not parsed:
            raise ValueError(f"math-verify finds no answer in the label {label!r}")
        return parsed

    def score(response: str, label: str) -> float:
        answer = parse(response, parsing_timeout=limit)
        return float(verify(parse_label(label), answer, timeout_seconds=limit))

    return score


def gsm8k(response: str, label: str, flexible: bool = False) -> float:
    """1 when the number after the response's last `####` is that of the label, else 0.

    The label is a raw answer of GSM8K (`... #### 72`) or the number alone. Numbers are compared as numbers: `1,000`,
    `$1000` and `1000.0` are one. `flexible` takes the response's last number where it has no `####`.
    (GSM8K, arXiv 2110.14168, and verl's `gsm8k` score, strict and flexible.)

    Raises:
        ValueError: the label has no number.
    """
    wanted = _number_at(label.rpartition("####")[2])
    if wanted is None:
        raise ValueError(f"the label has no number, after #### or alone: {label[-80:]!r}")
    _, mark, rest = response.rpartition("####")
    if mark:
        found = _number_at(rest)
    else:
        numbers = _NUMBER.findall(response[-_ANSWER_CHARACTERS:]) if flexible else []
        found = _number_at(numbers[-1]) if numbers else None
    return float(found is not None and found == wanted)


_ANSWER_CHARACTERS = 1000
_MAX_DIGITS = 64
# Linear, whatever the text is: each character is looked at once.
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_NUMBER_FIRST = re.compile(r"(-?) ?[$€£]? ?(-?\d[\d,]*(?:\.\d+)?|-?\.\d+)")


def _number_at(text: str) -> Decimal | None:
    """The number that a text begins with; None without one, or with one that is too long to be an answer."""
    found = _NUMBER_FIRST.match(text[:_ANSWER_CHARACTERS].lstrip())
    if found is None or len(found[2]) > _MAX_DIGITS:
        return None
    return Decimal(found[1] + found[2].replace(",", "")) if not (found[1] and found[2][0] == "-") else None


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
