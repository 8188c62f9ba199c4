"""The rewards that a manifest can name, but for `match`. Imported by the scoring processes: keep it light."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

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


def check_args(name: str, args: dict[str, Any]) -> None:
    """UserError when a built-in reward does not take these `args`."""
    if name != "regex":
        if args:
            raise UserError(f"reward.args: {name} takes none, but {', '.join(map(repr, args))} was given")
        return
    if unknown := set(args) - {"pattern", "compare"}:
        raise UserError(f"reward.args: regex takes pattern and compare, not {', '.join(map(repr, sorted(unknown)))}")
    if not isinstance(args.get("pattern"), str):
        raise UserError("reward.args.pattern: regex needs a pattern, a string")
    if not isinstance(args.get("compare"), bool | None):
        raise UserError(f"reward.args.compare: true or false, not {args['compare']!r}")
    try:
        re.compile(args["pattern"])
    except re.error as error:
        raise UserError(f"reward.args.pattern: {args['pattern']!r} is not a regular expression: {error}") from error
