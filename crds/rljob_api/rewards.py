"""Facts about rewards for manifest and worker."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_TAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_FUNCTION = re.compile(r"[A-Za-z_]\w{0,127}")
MAX_TAGS = 8
MAX_TOKENS = 2**24
SANDBOX_SHARE = 0.8
"""Share of a reward's time-out in which all tests of a program have to end: those that were not come to have failed."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One of a built-in reward's `args`."""

    allowed: str
    """In words."""
    fits: Callable[[Any], bool]


def _is_tokens(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= MAX_TOKENS


def _are_tags(value: Any) -> bool:
    fit = isinstance(value, list) and all(isinstance(tag, str) and _TAG.fullmatch(tag) for tag in value)
    return fit and 1 <= len(value) <= MAX_TAGS and len(set(value)) == len(value)


_TEXT = Argument("a string", lambda value: isinstance(value, str))
_SWITCH = Argument("true or false", lambda value: isinstance(value, bool))
_TOKENS = Argument(f"a number of tokens, 1 to {MAX_TOKENS}", _is_tokens(1))
_TARGET = Argument(f"a number of tokens, 0 to {MAX_TOKENS}", _is_tokens(0))
_TAGS = Argument(f"1 to {MAX_TAGS} different names of tags, like [think, answer]", _are_tags)


_COLUMN = Argument(
    "the name of a column", lambda value: isinstance(value, str) and value.isprintable() and 0 < len(value) <= 253
)
_JUDGE = Argument("the name of one of spec.judges", lambda value: isinstance(value, str) and 0 < len(value) <= 63)


def _is_function(value: Any) -> bool:
    return isinstance(value, str) and bool(_FUNCTION.fullmatch(value)) and not keyword.iskeyword(value)


_NAME = Argument("the name of a function", _is_function)


def _one_of(*values: str) -> Argument:
    return Argument(" or ".join((", ".join(values[:-1]), values[-1])), lambda value: value in values)


@dataclass(frozen=True, slots=True)
class BuiltinReward:
    """A reward that a manifest can name."""

    compares: bool = False
    """It needs a label, whatever its arguments are."""
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    required: tuple[str, ...] = ()


BUILTIN_REWARDS: Mapping[str, BuiltinReward] = {
    "match": BuiltinReward(compares=True),
    "exact": BuiltinReward(compares=True),
    "regex": BuiltinReward(arguments={"pattern": _TEXT, "compare": _SWITCH}, required=("pattern",)),
    "math": BuiltinReward(compares=True),
    "gsm8k": BuiltinReward(compares=True, arguments={"flexible": _SWITCH}),
    "format": BuiltinReward(arguments={"tags": _TAGS, "opened": _SWITCH, "rest": _SWITCH}),
    "length": BuiltinReward(arguments={"limit": _TOKENS, "target": _TARGET}),
    "overlong": BuiltinReward(arguments={"limit": _TOKENS, "cache": _TOKENS}, required=("cache",)),
    "environment": BuiltinReward(),
    "judge": BuiltinReward(arguments={"judge": _JUDGE}),
    "code": BuiltinReward(
        arguments={
            "kind": _one_of("Stdin", "Calls", "Pytest"), "tests": _COLUMN, "function": _NAME,
            "score": _one_of("All", "Share"), "extract": _one_of("Fence", "Whole"), "prefix": _COLUMN,
        },
        required=("kind", "tests"),
    ),
}  # fmt: skip


def argument_faults(name: str, args: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(argument, what is wrong, what is allowed) of a built-in reward's `args`; a missing one is none."""
    known = BUILTIN_REWARDS[name].arguments
    for key, value in args.items():
        if key not in known:
            yield key, f"is no argument of the reward {name}", ", ".join(known) or "leave args out"
        elif not known[key].fits(value):
            yield key, "has the wrong type or value", known[key].allowed
    if name == "code" and "function" in args and args.get("kind") in ("Stdin", "Pytest"):
        yield "function", f"has no effect with kind: {args['kind']}", "only with kind: Calls"
    if name == "code" and args.get("prefix") is not None and args.get("prefix") == args.get("tests"):
        yield "prefix", "is the column of the tests", "another column, or none"
    pattern = args.get("pattern")
    if name == "regex" and pattern == "":
        yield "pattern", "is found in every response", "one that is not empty"
    elif name == "regex" and isinstance(pattern, str):
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            yield "pattern", f"is no regular expression: {error}", "as Python's re takes it"


def missing_arguments(name: str, args: Mapping[str, Any]) -> list[str]:
    """Arguments that a built-in reward needs and was not given."""
    if name not in BUILTIN_REWARDS:
        return []
    return [key for key in BUILTIN_REWARDS[name].required if args.get(key) is None]


def token_limit(args: Mapping[str, Any], max_response_tokens: int) -> int:
    """`limit` of `length` and `overlong`: as many tokens as a response can have, where it is not given."""
    limit = args.get("limit")
    # One that is no number is reported as such (`argument_faults`).
    return limit if type(limit) is int else max_response_tokens


def part_name(part: Any) -> str:
    """The name by which a part of a reward is recorded: its own, that of the built-in reward, or the function's."""
    return str(part.record_as or part.name or (part.python or "").rpartition(":")[2])


def function_file(path: str | None) -> tuple[str, str] | None:
    """(file, function) of a `FILE.py:FUNCTION`; None for `package.module:function`, and for None."""
    file, _, function = (path or "").rpartition(":")
    return (file, function) if file.endswith(".py") else None
