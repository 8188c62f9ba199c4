"""Tests of a program as data sets have them, and the program in a response. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_worker.sandbox.plain import NotPlainError, pack

_FENCE = "```"
_LANGUAGES = ("", "python", "python3", "py")


@dataclass(frozen=True, slots=True)
class StdinCase:
    """A program that reads and prints."""

    given: bytes
    expected: str


@dataclass(frozen=True, slots=True)
class CallCase:
    """A function that is called."""

    function: str
    args: object
    """Arguments as `sandbox.plain.pack` gives a list."""
    kwargs: object
    """Likewise, of a dict."""
    expected: object


def program_of(response: str, extract: str) -> str | None:
    """The program in a response: the last fenced block of Python that is closed, or with `Whole` all of it.

    Returns:
        None where there is none.
    """
    if extract == "Whole":
        return response
    found: str | None = None
    block: list[str] | None = None
    is_python = False
    for line in response.splitlines(keepends=True):
        mark = line.strip()
        if not mark.startswith(_FENCE):
            if block is not None:
                block.append(line)
        elif block is None:
            # One of another language is passed over.
            block, is_python = [], mark.strip("`").strip().lower() in _LANGUAGES
        else:
            found, block = ("".join(block) if is_python else found), None
    return found


def column(row: Mapping[str, object], name: str) -> object:
    """A column of a row; `a.b` names field `b` of a column of mappings. Raises ValueError where it is not there."""
    found: object = row
    if name in row:
        return row[name]
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise ValueError(f"the row has no column {name!r}")
        found = found[part]
    return found


def stdin_cases(tests: object) -> list[StdinCase]:
    """Raises ValueError where they are in none of the forms."""
    return [StdinCase(_text(given).encode(), _text(expected)) for given, expected in _pairs(tests)[1]]


def call_cases(tests: object, function: str | None) -> list[CallCase]:
    """Calls of `function`, or of the one that the tests name as `fn_name`.

    Raises:
        ValueError: they are in none of the forms, or no function is named.
    """
    named, pairs = _pairs(tests)
    name = function or named
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError("no function is named: by fn_name of the tests, or args.function of the reward")
    return [_call_case(name, given, expected) for given, expected in pairs]


def _call_case(name: str, given: object, expected: object) -> CallCase:
    if isinstance(given, str):
        # LiveCodeBench: an argument a line, as JSON, and the result likewise.
        given = [_json(line, "a line of an input") for line in given.splitlines()]
        expected = _json(expected, "an output") if isinstance(expected, str) else expected
    if _holds_nan(expected):
        # Tables have it where a value is missing: a program that returns NaN for a mistake would be right.
        raise ValueError("an output is NaN, which tables have for a value that is missing")
    if not isinstance(given, list | Mapping):
        raise ValueError("an input is neither a list of arguments, nor a mapping, nor lines of JSON")
    args, kwargs = ([], dict(given)) if isinstance(given, Mapping) else (given, {})
    try:
        return CallCase(name, pack(args), pack(kwargs), expected)
    except NotPlainError as error:
        raise ValueError(f"an input holds what is no plain value: {error}") from None


def _holds_nan(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_nan, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_nan, value))
    return isinstance(value, float) and value != value


def test_file(tests: object) -> str:
    """The text of pytest's file: as it is, or the `assert_code` of a list joined. Raises ValueError for no text."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        tests = _json(tests, "the text of the tests")
    if isinstance(tests, Mapping):
        tests = [tests]
    if isinstance(tests, Sequence) and not isinstance(tests, str):
        tests = "\n\n".join(_text(one.get("assert_code") if isinstance(one, Mapping) else one) for one in tests)
    text = _text(tests)
    try:
        compile(text, "test_solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the tests are no Python: {error}") from None
    if "test" not in text:
        raise ValueError("the tests have no function test_...")
    return text


def _pairs(tests: object) -> tuple[object, list[tuple[object, object]]]:
    """(function, (input, output) of each case)."""
    if isinstance(tests, str):
        tests = _json(tests, "the text of the tests")
    if isinstance(tests, Mapping) and "inputs" in tests and "outputs" in tests:
        inputs, outputs = (_list(tests[name], name) for name in ("inputs", "outputs"))
        if len(inputs) != len(outputs):
            raise ValueError(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs")
        name, pairs = tests.get("fn_name"), list(zip(inputs, outputs))
    elif isinstance(tests, Sequence) and all(isinstance(t, Mapping) and {"input", "output"} <= t.keys() for t in tests):
        names = [test["fn_name"] for test in tests if test.get("fn_name")]
        name, pairs = (names or [None])[0], [(test["input"], test["output"]) for test in tests]
    else:
        raise ValueError("the tests are neither [{input, output}, ...] nor {inputs: [...], outputs: [...]}")
    if not pairs:
        raise ValueError("there are no tests")
    return name, pairs


def _list(value: object, name: str) -> list[object]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} of the tests is {type(value).__name__}: a list is needed, with an item for each test")
    return list(value)


def _text(value: object) -> str:
    """A text, or lines of one."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"a text is needed, not {type(value).__name__}")
    return value


def _json(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON: {error}") from None


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs are the same but for white space at the ends of lines, and empty lines at the end."""
    one, other = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return one == other


def same_value(got: object, expected: object) -> bool:
    """Whether two plain values are the same.

    Floats are when they differ by 1e-6 of themselves, or by 1e-9; tuples are lists, and keys of mappings their texts,
    since JSON, in which tests are written, has neither of the others. `True` is not 1.
    """
    if isinstance(got, bool) or isinstance(expected, bool) or got is None or expected is None:
        return got is expected
    if isinstance(got, float) or isinstance(expected, float):
        return isinstance(got, int | float) and isinstance(expected, int | float) and _close(got, expected)
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(same_value, got, expected))
    if isinstance(got, dict) and isinstance(expected, Mapping):
        one, other = _by_text(got), _by_text(expected)
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    return type(got) is type(expected) and bool(got == expected)


def _close(one: float, other: float) -> bool:
    if one != one or other != other:
        return one != one and other != other
    try:
        return one == other or abs(one - other) <= max(1e-6 * max(abs(one), abs(other)), 1e-9)
    except OverflowError:
        return False


def _by_text(mapping: Mapping[object, object]) -> dict[str, object]:
    return {key if isinstance(key, str) else json.dumps(key, default=repr): value for key, value in mapping.items()}
