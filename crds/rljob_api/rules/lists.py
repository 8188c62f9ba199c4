"""Lists and mappings of names: what stands in one twice, and names that a policy could not write."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from pydantic.alias_generators import to_camel

from rljob_api.base import INT64_MAX
from rljob_api.environments import Form
from rljob_api.rules.findings import Check, Finding, one_line
from rljob_api.spec import (
    DataSpec,
    EnvironmentSpec,
    EvaluationSet,
    EvaluationSpec,
    FailureRule,
    GymnasiumSpec,
    LoraSpec,
    PodsSpec,
    ProfileSpec,
    RewardPart,
    RewardSpec,
    RolloutSpec,
    TextEnvironmentSpec,
)


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
        elif not -INT64_MAX <= gymnasium.actions[name] <= INT64_MAX:
            yield Finding(at, "is no number of an action", "one that 64 bits hold")
        seen.setdefault(name.lower(), name)


def _adapted(lora: Any) -> Iterator[Finding]:
    for index, name in enumerate(lora.targets or ()):
        if name in _NOT_ADAPTED:
            wrong = "is no module of the model's layers: the embedding and the head stay as they are"
            yield Finding(("targets", index), wrong, "linear modules, such as q_proj")


_NOT_ADAPTED = ("lm_head", "embed_tokens", "wte", "embed_out")


def _skipped_once(data: Any) -> Iterator[Finding]:
    """Rows are the same whatever their numbers are written like; without a name they are of the only source."""
    several, seen = len(data.sources) > 1, dict[tuple[str, int], int]()
    names = [source.name for source in data.sources]
    for index, value in enumerate(data.skip):
        name, _, number = str(value).rpartition("/")
        if int(number) > INT64_MAX:
            yield Finding(("skip", index), "is no number of a row", "one that 64 bits hold")
        elif str(value).startswith("/"):
            yield Finding(("skip", index), "has no name before the stroke", f"NAME/{number}, or the number alone")
        elif name and not several and (own := _only_name(data)) not in (None, name):
            yield Finding(("skip", index), "there is no source of this name", f"{own}/{number}, or the number alone")
        elif not name and several:
            wrong = "does not say which of the sources the row is of"
            yield Finding(("skip", index), wrong, f"NAME/{number}, with the name of a source")
        elif several and None not in names and name not in names:
            yield Finding(("skip", index), "there is no source of this name", ", ".join(names))
        elif (row := (name if several else "", int(number))) in seen:
            yield Finding(("skip", index), f"is there already, as skip[{seen[row]}]", "each row once")
        else:
            seen[row] = index


def _only_name(data: Any) -> str | None:
    """The name of the only source; None where the data say it."""
    source = data.sources[0] if data.sources else data
    is_file = source.path is not None and PurePosixPath(source.path).suffix in (".jsonl", ".parquet")
    return source.name or (PurePosixPath(source.path).stem if is_file else None)


LIST_CHECKS: dict[type, tuple[Check, ...]] = {
    RewardPart: (_once("rows"),),
    LoraSpec: (_once("targets"), _adapted),
    EvaluationSpec: (_once("pass_at"),),
    EvaluationSet: (_once("pass_at"),),
    ProfileSpec: (_once("ranks", "engines"),),
    GymnasiumSpec: (_actions,),
    RolloutSpec: (_once("stop", "stop_token_ids"),),
    RewardSpec: (_once("environment", "read_paths", "write_paths"),),
    TextEnvironmentSpec: (_once("environment", "tools"),),
    EnvironmentSpec: (_once("secrets", "python_path"),),
    PodsSpec: (_once("image_pull_secrets"),),
    FailureRule: (one_line("name"), _once("exit_codes", "reasons")),
    DataSpec: (_skipped_once,),
}
