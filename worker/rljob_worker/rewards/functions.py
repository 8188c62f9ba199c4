"""Users' reward functions: finding, checking and calling them. Imported by the scoring processes: keep it light."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from rljob_api.how_many import how_many
from rljob_worker.confined.loading import load_named, whole_characters
from rljob_worker.errors import UserError

RESERVED = ("prompt", "response", "label", "finish_reason")
"""Names that every reward function can ask for, beside the columns of the row and `args`."""

LARGEST = (2 - 2**-23) * 2.0**127
"""Largest number of fp32, in which scores are trained on."""

Sample = Mapping[str, Any]


class Score(NamedTuple):
    """A reward's answer for one sample."""

    value: float | None
    """None: the function gives this sample none."""
    parts: dict[str, float] = {}
    """Numbers that were reported beside it."""
    note: str | None = None
    """Text that was."""


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why a reward gave no score."""

    text: str
    outage: bool = False
    """Whether the fault is not in the sample: it fails the step, whatever `onError` says."""


class RewardOutageError(Exception):
    """A service that a reward needs gives no usable answer."""


REACH = (
    "a reward reads its own folder, the working directory, Python packages and what reward.readPaths names, and "
    "writes to its temporary folder (TMPDIR) and what reward.writePaths names"
)


def load_function(path: str) -> Callable[..., Any]:
    """The function at `package.module:function` or `FILE.py:function`; UserError when it does not import or is not
    there."""
    function: Callable[..., Any] = load_named(path, "reward.python", "function", REACH)
    if not callable(function):
        raise UserError(f"reward.python: {path!r} is not a function but {type(function).__name__}")
    return function


def check_call(
    function: Callable[..., Any], path: str, args: Mapping[str, Any], batch: bool, columns: frozenset[str] | None = None
) -> None:
    """UserError when the function cannot be called with `args` and, where they are known, the rows' columns."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UserError(f"reward.python: {path!r} does not tell its parameters ({error}): wrap it in a def") from error
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in args:
        if name in RESERVED:
            raise UserError(f"reward.args: {name!r} is given to every reward function already: rename it")
        if name not in parameters and not takes_any:
            near = difflib.get_close_matches(name, parameters)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"reward.args: {path!r} has no parameter {name!r}{hint}")
    if not batch:
        _check_parameters(parameters, path, {*RESERVED, *args}, columns)
    if batch:
        try:
            inspect.signature(function).bind([], **args)
        except TypeError as error:
            raise UserError(
                f"reward.python: {path!r} with batch: true is called as f(samples, **args), which fails: {error}"
            ) from error


def _check_parameters(
    parameters: Mapping[str, inspect.Parameter], path: str, given: set[str], columns: frozenset[str] | None
) -> None:
    for name, parameter in parameters.items():
        if parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(f"reward.python: {path!r} takes {name!r} by position alone; arguments are given by name")
        if columns is not None and name not in given | columns:
            raise UserError(
                f"reward.python: {path!r} asks for {name!r}, which is neither a column of the data nor in reward.args; "
                f"there are {', '.join(sorted(given | columns))} (the column of labelKey comes as label)"
            )


def make_caller(function: Callable[..., Any], args: Mapping[str, Any]) -> Callable[[Sample], Any]:
    """Call for one sample with the arguments that the function names: `RESERVED`, columns of the row, `args`."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    wanted = {name for name, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}

    def call(sample: Sample) -> Any:
        given = flatten(sample) | dict(args)
        return function(**(given if takes_any else {name: given[name] for name in wanted if name in given}))

    return call


def flatten(sample: Sample) -> dict[str, Any]:
    """One dict of the row's columns and the reserved names, which win over columns of the same name."""
    return dict(sample["metadata"]) | {name: sample[name] for name in RESERVED}


def received_scores(values: Any, expected: int) -> list[Score]:
    """Scores as a scoring process sent them, which runs code that nobody checked. Raises ValueError."""
    try:
        given = [
            (score, dict(parts), None if note is None else whole_characters(str(note))) for score, parts, note in values
        ]
    except (TypeError, ValueError) as error:
        raise ValueError(f"not scores: {error}") from None
    scores = iter(checked_batch([parts | {"score": score} for score, parts, _ in given if score is not None], None))
    if len(given) != expected:
        raise ValueError(
            f"{how_many(len(given), 'score was', 'scores were')} returned for {how_many(expected, 'sample')}"
        )
    return [Score(None) if score is None else next(scores)._replace(note=note) for score, _, note in given]


def checked_score(value: Any) -> Score:
    """Checked result of a reward function, as (score, parts): a number, or a dict of numbers with a `score`.

    Raises ValueError for anything else, NaN and infinity included.
    """
    if not isinstance(value, Mapping):
        return Score(_number(value, "the reward"), {})
    if "score" not in value:
        raise ValueError(f"the returned dict has no 'score'; its keys are: {', '.join(map(repr, value))}")
    parts = {
        whole_characters(str(name)): _number(part, f"part {name!r}") for name, part in value.items() if name != "score"
    }
    return Score(_number(value["score"], "'score'"), parts)


def checked_batch(values: Any, expected: int | None) -> list[Score]:
    """Checked result of a batch function: one score for each sample, if their number is known. Raises ValueError."""
    if isinstance(values, (str, bytes, Mapping)) or not (isinstance(values, Sequence) or hasattr(values, "tolist")):
        raise ValueError(f"a list of {expected} scores is needed, not {type(values).__name__}")
    try:
        scores = list(values)
    except TypeError:
        # An array of one number, without a dimension.
        raise ValueError(f"a list of {expected} scores is needed, not {type(values).__name__}") from None
    if expected is not None and len(scores) != expected:
        raise ValueError(
            f"{how_many(len(scores), 'score was', 'scores were')} returned for {how_many(expected, 'sample')}"
        )
    return [checked_score(score) for score in scores]


def is_score(value: object) -> bool:
    """Whether it is a number that can be trained on."""
    try:
        _number(value, "it")
    except (ValueError, TypeError):
        return False
    return True


def _number(value: Any, name: str) -> float:
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    # Scalars of numpy and torch, and their arrays of one.
    if hasattr(value, "item") and tuple(getattr(value, "shape", (0,))) in ((), (1,)):
        value = value.item()
    if not isinstance(value, numbers.Real | Decimal):
        raise ValueError(f"{name} is {type(value).__name__} ({str(value)[:80]!r}), not a number{_remedy(value)}")
    return representable(value, name)


def _remedy(value: object) -> str:
    """The rest of a message about what a function made in the place of a number; empty where that says enough."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            # Python would warn that nobody awaited it.
            value.close()
        return ": await it in the function, which is then an async def"
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return ": return it in the place of yield"
    return ""


def representable(value: Any, name: str) -> float:
    """A number as trainers have it, which compute in fp32. Raises ValueError where that is not finite."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {_digits(value)}, not a finite number")
    if abs(number) > LARGEST:
        raise ValueError(f"{name} is {number:g}, which is not finite in fp32: {LARGEST:.2g} at most")
    return number


def _digits(value: object) -> str:
    try:
        return str(value)[:80]
    except ValueError:
        # Python writes no whole number of more than 4300.
        return "a whole number of thousands of digits"
