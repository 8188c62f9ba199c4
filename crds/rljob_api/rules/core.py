"""Rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rljob_api.base import ApiModel
from rljob_api.rules.findings import Finding


@dataclass(frozen=True)
class Rule:
    """A condition between the fields of one block.

    `check` gets the block with snake_case attributes; an attribute that the manifest got wrong is missing from it,
    so that a rule stays silent about fields that were already reported.
    """

    on: type[ApiModel]
    field: str
    """The field that is blamed, relative to the block, in camelCase; empty: the block itself."""
    wrong: str
    allowed: str
    check: Callable[[Any], bool]
    cel: str | None
    """The same condition over `self`; None where CEL cannot see the fields (free-form mappings)."""
    at_field: bool = False
    """`self` is the field, not the block: the API server evaluates the rule only where the field is given."""
    exact: Callable[[Any], Iterator[Finding]] | None = None
    """Places in the field that break the rule, and the right value there, for readers of the manifest with this
    package."""

    @property
    def message(self) -> str:
        """Message of the API server."""
        return f"{self.wrong}; allowed: {self.allowed}"


def cel_list(names: Iterable[str]) -> str:
    """Return names as a list of CEL."""
    return f"[{', '.join(repr(name) for name in names)}]"


def exactly_one(on: type[ApiModel], *fields: str) -> Rule:
    """Return the rule that exactly one of some optional fields is given."""
    attributes = [re.sub(r"([A-Z])", lambda m: "_" + m.group(1).lower(), name) for name in fields]
    count = " + ".join(f"(has(self.{name}) ? 1 : 0)" for name in fields)
    names = " and ".join([", ".join(fields[:-1]), fields[-1]])
    return Rule(
        on=on,
        field="",
        wrong=f"needs exactly one of {names}",
        allowed=f"one of {', '.join(fields)}, and none of the others",
        check=lambda block: sum(getattr(block, name) is not None for name in attributes) == 1,
        cel=f"{count} == 1",
    )
