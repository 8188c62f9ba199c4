"""Lists and mappings of names: what stands in one twice, and names that a policy could not write."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic.alias_generators import to_camel

from rljob_api.environments import Form
from rljob_api.rules.findings import Check, Finding
from rljob_api.spec import EvaluationSet, EvaluationSpec, GymnasiumSpec, LoraSpec, ProfileSpec, RewardPart


def _once(*fields: str) -> Check:
    """A value that a list has twice is a slip: another one was meant."""

    def check(block: Any) -> Iterator[Finding]:
        for field in fields:
            values: Sequence[object] = getattr(block, field) or ()
            for index, value in enumerate(values):
                if value in values[:index]:
                    wrong = f"is there already, as {to_camel(field)}[{values.index(value)}]"
                    yield Finding((to_camel(field), index), wrong, "each value once")

    return check


def _actions(gymnasium: Any) -> Iterator[Finding]:
    """An answer is compared without regard to case, and in tags without blanks around it."""
    tags = gymnasium.form is not Form.PLAIN
    seen: dict[str, str] = {}
    for name in gymnasium.actions:
        at = ("actions", name)
        if not name or name != name.strip() or not name.isprintable():
            yield Finding(at, "is no name that a policy could write", "a word, without blanks around it")
        elif tags and re.search("[<>]", name):
            yield Finding(at, f"is no name between tags (form: {gymnasium.form})", "without '<' and '>'")
        elif name.lower() in seen:
            wrong = f"is {seen[name.lower()]!r} but for its case, of which an answer tells nothing"
            yield Finding(at, wrong, "names that differ otherwise")
        seen.setdefault(name.lower(), name)


LIST_CHECKS: dict[type, tuple[Check, ...]] = {
    RewardPart: (_once("rows"),),
    LoraSpec: (_once("targets"),),
    EvaluationSpec: (_once("pass_at"),),
    EvaluationSet: (_once("pass_at"),),
    ProfileSpec: (_once("ranks", "engines"),),
    GymnasiumSpec: (_actions,),
}
