"""Reward functions written for other frameworks: recognised by their parameters, and called as those call them.

Imported by the scoring processes: keep it light.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any

from rljob_api.how_many import how_many
from rljob_worker.errors import UserError
from rljob_worker.rewards.functions import Sample, Score, checked_batch, checked_score, is_score
from rljob_worker.rewards.slime_samples import SlimeArgs, by_reward_key, slime_sample

Call = Callable[[list[Sample]], Any]
Check = Callable[[object, list[Sample]], list[Score]]


class Signature(StrEnum):
    """Framework that calls a function, as `reward.signature` has it."""

    RLJOB = "RLJob"
    TRL = "TRL"
    VERL = "Verl"
    SLIME = "Slime"


FORMS = (
    "RLJob: response (or samples with batch: true); TRL and open-r1: completions or completion_ids; "
    "Verl: solution_str; Slime: args, sample (or args, samples) first"
)
"""The parameters by which each is recognised."""


def signatures_of(parameters: Sequence[str], takes_any: bool, batch: bool) -> list[Signature]:
    """The signatures that a function's parameters fit.

    Args:
        parameters: names, in their order, without `*args` and `**kwargs`.
        takes_any: whether it has `**kwargs`.
        batch: `reward.batch`.
    """
    names = set(parameters)
    found = [
        signature
        for signature, fits in (
            (Signature.RLJOB, "response" in names or (batch and bool(parameters))),
            (Signature.TRL, bool(names & {"completions", "completion_ids"})),
            (Signature.VERL, "solution_str" in names),
            (Signature.SLIME, tuple(parameters[:2]) in (("args", "sample"), ("args", "samples"))),
        )
        if fits
    ]
    if found or not takes_any:
        return found
    # Its response comes under whatever name it is given.
    return [Signature.RLJOB, Signature.TRL, Signature.VERL]


def recognise(wanted: str, parameters: Sequence[str], takes_any: bool, batch: bool, path: str) -> Signature:
    """The signature of a function; `wanted` is `reward.signature`.

    Raises:
        UserError: beginning with `reward`, where `Auto` finds none or several.
    """
    if wanted != "Auto":
        return Signature(wanted)
    found = signatures_of(parameters, takes_any, batch)
    if len(found) == 1:
        return found[0]
    listed = ", ".join(parameters) or ("**kwargs alone" if takes_any else "none")
    if not found:
        raise UserError(
            f"reward.signature: Auto: {path!r} has the parameters {listed}, which are those of no framework; known are "
            f"{FORMS}"
        )
    raise UserError(
        f"reward.signature: Auto: {path!r} has the parameters {listed}, which fit {' and '.join(found)}: set "
        f"reward.signature to the one that it was written for"
    )


def signature_of_function(function: Callable[..., object], wanted: str, batch: bool, path: str) -> Signature:
    """Same as `recognise`, for a function that was imported."""
    if wanted != "Auto":
        return Signature(wanted)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UserError(f"reward.python: {path!r} does not tell its parameters ({error}): wrap it in a def") from error
    named = [name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return recognise(wanted, named, takes_any, batch, path)


TOKENS_GIVEN = (Signature.TRL, Signature.SLIME)
"""Signatures whose functions are given token ids."""


def is_grouped(function: Callable[..., object], signature: Signature) -> bool:
    """Whether one call scores all samples of a prompt."""
    if signature is Signature.SLIME:
        return list(inspect.signature(function).parameters)[1:2] == ["samples"]
    return signature is Signature.TRL


def make_peer(
    function: Callable[..., object],
    signature: Signature,
    args: Mapping[str, object],
    path: str,
    columns: Collection[str] | None,
) -> tuple[Call, Check]:
    """A call for a task's samples, and the check of what it returns.

    Raises:
        UserError: beginning with `reward`, where the function asks for what there is not.
    """
    if signature is Signature.TRL:
        _check_names(function, {*GIVEN[signature], *args}, path, columns)
        return lambda samples: _call_trl(function, args, samples), _check_trl
    if signature is Signature.VERL:
        _check_names(function, {*GIVEN[signature], *args}, path, ())
        return lambda samples: _call_verl(function, args, samples[0]), lambda value, _: [_verl_score(value)]
    given = SlimeArgs(args)
    _check_two(function, path)
    if is_grouped(function, signature):
        return (
            lambda samples: function(given, [slime_sample(sample, index) for index, sample in enumerate(samples)]),
            lambda value, samples: checked_batch([by_reward_key(one, args) for one in value], len(samples)),
        )
    return (
        lambda samples: function(given, slime_sample(samples[0], 0)),
        lambda value, _: [checked_score(by_reward_key(value, args))],
    )


GIVEN = {
    Signature.TRL: ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
    Signature.VERL: ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""Names that a function gets beside `reward.args` and, TRL's, the columns of the row."""


def _check_names(function: Callable[..., object], given: set[str], path: str, columns: Collection[str] | None) -> None:
    """Refuse a function that needs what it would not get; `columns` None: they are not known."""
    if columns is None:
        return
    for name, parameter in inspect.signature(function).parameters.items():
        optional = parameter.default is not parameter.empty
        if optional or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if name not in given | set(columns):
            raise UserError(
                f"reward.python: {path!r} asks for {name!r}, which is neither a column of the data nor in reward.args; "
                f"there are {', '.join(sorted(given | set(columns)))}"
            )


def _check_two(function: Callable[..., object], path: str) -> None:
    """Refuse a function that cannot be called as slime calls its own."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise UserError(f"reward.python: {path!r} is called as f(args, sample), which fails: {error}") from error


def _named(function: Callable[..., object], given: Mapping[str, object]) -> dict[str, object]:
    """The part of it that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


def _call_trl(function: Callable[..., object], args: Mapping[str, object], samples: list[Sample]) -> object:
    """Lists of a group, messages where the data are conversational; each column of the row is a list."""
    first = samples[0]
    chat = first["messages"] is not None
    columns = {
        name: [sample["row"].get(name) for sample in samples]
        for name in first["row"]
        if name not in ("prompt", "completion", "completion_ids")
    }
    given = {
        "prompts": [sample["messages"] if chat else sample["prompt"] for sample in samples],
        "completions": [
            [{"role": "assistant", "content": sample["response"]}] if chat else sample["response"] for sample in samples
        ],
        "completion_ids": [list(sample["token_ids"]) for sample in samples],
        "trainer_state": None,
        "log_extra": _log_nothing,
        "log_metric": _log_nothing,
    }
    return function(**_named(function, columns | given | dict(args)))


def _log_nothing(*_: object, **__: object) -> None:
    """Stand in the place of what TRL logs with."""


def _check_trl(value: object, samples: list[Sample]) -> list[Score]:
    """None in the place of a number is no score."""
    if not isinstance(value, list | tuple):
        return checked_batch(value, len(samples))
    numbers = iter(checked_batch([one for one in value if one is not None], sum(one is not None for one in value)))
    if len(value) != len(samples):
        raise ValueError(
            f"{how_many(len(value), 'score was', 'scores were')} returned for {how_many(len(samples), 'sample')}"
        )
    return [Score(None) if one is None else next(numbers) for one in value]


def _call_verl(function: Callable[..., object], args: Mapping[str, object], sample: Sample) -> object:
    row = sample["row"]
    model = row.get("reward_model")
    nested = isinstance(model, Mapping) and "ground_truth" in model
    extra = row.get("extra_info")
    if not isinstance(extra, Mapping | None):
        raise ValueError(f"the row's extra_info is {type(extra).__name__}, not an object")
    given = {
        "data_source": row.get("data_source", sample["source"]),
        "solution_str": sample["response"],
        "ground_truth": model["ground_truth"] if isinstance(model, Mapping) and nested else sample["raw_label"],
        "extra_info": dict(extra or {}),
    }
    return function(**_named(function, given | dict(args)))


def _verl_score(value: object) -> Score:
    """Values beside the score that are no numbers go into verl's own logs alone."""
    if isinstance(value, Mapping):
        return checked_score({name: part for name, part in value.items() if name == "score" or is_score(part)})
    return checked_score(value)
