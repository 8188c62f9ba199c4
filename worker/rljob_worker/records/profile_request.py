"""A request for profiles, as the manifest and HTTP give it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_worker.errors import UserError

MOST_STEPS = 100
"""Most steps of one request."""
_MOST_NUMBERS = 64
_MEBIBYTES = 512


class BusyError(UserError):
    """Another request is not done."""


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """Steps and processes that are profiled."""

    first: int
    last: int
    ranks: Sequence[int] = (0,)
    engines: Sequence[int] = (0,)
    stacks: bool = False
    most_bytes: int = _MEBIBYTES << 20
    """Most bytes of all files together, packed."""


def parse_request(query: Mapping[str, Sequence[str]]) -> ProfileRequest:
    """The request of a query string, as `parse_qs` gives it.

    Raises:
        UserError: names the parameter that is wrong.
    """
    given = {name: values[-1] for name, values in query.items()}
    if unknown := sorted(given.keys() - {"steps", "ranks", "engines", "stacks", "maxMebibytes"}):
        raise UserError(f"{unknown[0][:80]}: no such parameter; there are steps, ranks, engines, stacks, maxMebibytes")
    steps = re.fullmatch(r"([1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?", given.get("steps", ""))
    first, last = (int(steps[1]), int(steps[2] or steps[1])) if steps else (1, 0)
    if not first <= last < first + MOST_STEPS:
        said = given.get("steps", "")[:80]
        raise UserError(f"steps: {said!r} must be a step like 12, or first and last of at most {MOST_STEPS} like 12-13")
    size = given.get("maxMebibytes", str(_MEBIBYTES))
    if not re.fullmatch(r"[1-9][0-9]{0,5}", size):
        raise UserError(f"maxMebibytes: {size[:80]!r} must be a whole number from 1 to 999999")
    stacks = given.get("stacks", "false")
    if stacks not in ("true", "false"):
        raise UserError(f"stacks: {stacks[:80]!r} must be true or false")
    ranks, engines = (_numbers(name, given.get(name, "0")) for name in ("ranks", "engines"))
    return ProfileRequest(first, last, ranks, engines, stacks == "true", int(size) << 20)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """`0,3` as numbers; none of an empty text."""
    parts = text.split(",") if text else []
    if len(parts) > _MOST_NUMBERS or not all(re.fullmatch(r"[0-9]{1,6}", part) for part in parts):
        raise UserError(f"{name}: {text[:80]!r} must be at most {_MOST_NUMBERS} numbers like 0,3")
    return tuple(dict.fromkeys(map(int, parts)))
