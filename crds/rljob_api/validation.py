"""Reading a manifest: all problems at once, each with its path, value, what is wrong and what is allowed."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob_api.blocks import Path as FieldPath
from rljob_api.blocks import Views, path_text, without_nulls
from rljob_api.job import RLJob
from rljob_api.overrides import apply_overrides
from rljob_api.problems import ABSENT, ManifestError, Problem
from rljob_api.rules import Finding, checks_on, rules_on
from rljob_api.safe_text import other_letters
from rljob_api.schema import Node, describe, structural_schema, subschema
from rljob_api.yaml_text import BareKey, YamlError, bare_key, check_values, parse_yaml, read_text


def load_manifest(manifest: Path | str | dict[str, Any], overrides: list[str] | None = None) -> RLJob:
    """Read and check an RLJob.

    Args:
        manifest: a file, its name, YAML text (recognised by a line break or `: `), or the document itself.
        overrides: `path=value` settings put over it, see `apply_overrides`.

    Raises:
        ManifestError: with all problems.
    """
    document, source = _read(manifest)
    if not isinstance(document, dict):
        wrong, value = ("is empty", ABSENT) if document is None else ("is no mapping", document)
        raise ManifestError([Problem("", wrong, "an RLJob: apiVersion, kind, metadata, spec", value)], source)
    if overrides:
        document = apply_overrides(document, overrides)
    return _check(document, source)


def check_runnable_locally(job: RLJob) -> None:
    """Refuse what `rljob run` cannot do without a Ray cluster: this machine is one node.

    Raises:
        ManifestError: with all problems.
    """
    nodes = job.spec.resources.nodes
    problems = []
    if nodes != 1:
        problems.append(Problem("spec.resources.nodes", "this machine is one node", "1", nodes))
    for name in ("trainer", "rollout"):
        group = getattr(job.spec.resources, name)
        if group is not None and group.nodes is not None:
            wrong = "this machine is one node, and cannot hold nodes of their own"
            problems.append(Problem(f"spec.resources.{name}.nodes", wrong, "left out", group.nodes))
    if problems:
        raise ManifestError(problems, job.metadata.name)


def _read(manifest: Path | str | dict[str, Any]) -> tuple[Any, str]:
    if isinstance(manifest, dict):
        try:
            check_values(manifest)
        except YamlError as error:
            raise ManifestError([Problem("", str(error))], "manifest") from None
        return manifest, "manifest"
    is_text = isinstance(manifest, str) and (
        not manifest.strip() or "\n" in manifest or ": " in manifest or manifest.lstrip().startswith("{")
    )
    source = "manifest" if is_text else str(manifest)
    try:
        return parse_yaml(str(manifest) if is_text else read_text(Path(manifest))), source
    except FileNotFoundError:
        raise ManifestError([Problem("", "there is no such file")], source) from None
    except IsADirectoryError:
        raise ManifestError([Problem("", "is a folder", "a file with an RLJob")], source) from None
    except OSError as error:
        raise ManifestError([Problem("", f"cannot be read: {error.strerror}")], source) from None
    except YamlError as error:
        raise ManifestError([Problem("", str(error))], source) from None


def _bare_keys(value: Any, at: FieldPath = ()) -> Iterator[Problem]:
    """Keys that are no text: `NO`, `y` and `1` in YAML without quotation marks."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _bare_keys(item, (*at, i))
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                key = bare_key(str(key), key)
            if isinstance(key, BareKey):
                wrong = f"YAML reads this key as {key.read_as}; write it in quotation marks"
                yield Problem(path_text((*at, str(key))), wrong, f'"{key}": ...')
            yield from _bare_keys(item, (*at, str(key)))


def _not_finite(value: Any, bad: set[FieldPath], at: FieldPath = ()) -> Iterator[Problem]:
    """Numbers in free-form mappings that no JSON can hold; those of fields are reported with their bounds."""
    if isinstance(value, float) and not math.isfinite(value) and at not in bad:
        yield Problem(path_text(at), "is not finite", "a number that JSON can hold", value)
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in parts:
        yield from _not_finite(item, bad, (*at, key))


def _vanishing(value: Any, at: FieldPath = ()) -> Iterator[Problem]:
    """Numbers above 0 that are none where they are used: no clock has them, or fp32 rounds them to 0."""
    if isinstance(value, float) and 0 < abs(value) < _LEAST_SECONDS and at:
        seconds = str(at[-1]).endswith("Seconds") or at[-2:-1] == ("phases",)
        # The schema comes last: to make it takes longer than all else of a manifest.
        if (seconds or abs(value) < _LEAST_FP32) and _is_number(at):
            wrong, least = "is 0 in the fp32 that it is computed with", "1e-37"
            if seconds:
                wrong, least = "is over before anything could happen", str(_LEAST_SECONDS)
            yield Problem(path_text(at), wrong, f"at least {least}", value)
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in parts:
        yield from _vanishing(item, (*at, key))


def _is_number(at: FieldPath) -> bool:
    node = subschema(structural_schema(RLJob), at)
    return node is not None and node.get("type") == "number"


_MOST_PROBLEMS = 100
"""Most problems of fields and types that are explained: more are of a text that is no manifest."""
_LEAST_SECONDS = 0.0001
_LEAST_FP32 = 2.0**-126
"""The smallest number of fp32 that has all of its digits."""


def _check(document: dict[str, Any], source: str) -> RLJob:
    if bare := list(_bare_keys(document)):
        raise ManifestError(bare, source)
    document = without_nulls(RLJob, document)
    text = json.dumps(document)
    job, problems, bad = None, [], set[FieldPath]()
    either: dict[FieldPath, ErrorDetails] = {}
    try:
        job = RLJob.model_validate_json(text, strict=True)
    except ValidationError as error:
        schema = structural_schema(RLJob)
        details = error.errors(include_url=False)
        for detail in details[:_MOST_PROBLEMS]:
            if detail["type"] == "default_factory_not_called":
                # A default that follows from a field which is reported itself.
                continue
            loc = tuple(detail["loc"])
            bad.add(loc)
            if loc and "x-kubernetes-int-or-string" in (subschema(schema, loc[:-1]) or {}):
                # Each type that the value could have is blamed by its name: that which it has counts.
                if loc[:-1] not in either or detail["type"] in _WRONG:
                    either[loc[:-1]] = detail
                continue
            problems.append(_explain(detail, schema, document))
        if len(details) > _MOST_PROBLEMS:
            problems.append(
                Problem("", f"{len(details) - _MOST_PROBLEMS} further problems of such kinds are not listed")
            )
    problems += [_either(path, detail, document) for path, detail in either.items()]
    known = {problem.path for problem in problems}
    if "NaN" in text or "Infinity" in text:
        problems += _not_finite(document, bad)
    problems += [problem for problem in _vanishing(document) if problem.path not in known]
    problems += _broken_rules(document, bad)
    if problems or job is None:
        raise ManifestError(problems, source)
    return job


def _broken_rules(document: dict[str, Any], bad: set[FieldPath]) -> Iterator[Problem]:
    if () in bad:
        return
    views = Views(bad)
    views.view(RLJob, document, ())
    for model, at, view in reversed(views.found):
        for rule in rules_on(model):
            try:
                if rule.check(view):
                    continue
            except AttributeError:
                if bad:
                    continue
                raise
            path = (*at, *rule.field.split(".")) if rule.field else at
            if rule.exact is not None:
                said = path_text(path), rule.message
                for finding in rule.exact(view):
                    yield _of_finding(finding, at, document, said)
                continue
            # As it was written; what was left out as it is by default.
            value = _at(document, path)
            if value is ABSENT and rule.field:
                value = _lookup(view, rule.field)
            yield Problem(path_text(path), rule.wrong, rule.allowed, value)
        for check in checks_on(model):
            try:
                findings = list(check(view))
            except AttributeError:
                if bad:
                    continue
                raise
            for finding in findings:
                yield _of_finding(finding, at, document)


def _of_finding(
    finding: Finding, at: FieldPath, document: dict[str, Any], rule: tuple[str, str] | None = None
) -> Problem:
    path = (*at, *finding.path)
    return Problem(path_text(path), finding.wrong, finding.allowed, _at(document, path), rule)


def _lookup(view: Any, field: str) -> Any:
    for part in field.split("."):
        if isinstance(view, dict):
            view = view.get(part, ABSENT)
        else:
            view = getattr(view, re.sub(r"([A-Z])", lambda m: "_" + m.group(1).lower(), part), ABSENT)
        if view is ABSENT or view is None:
            return ABSENT
    return view


def _at(document: Any, path: FieldPath) -> Any:
    for part in path:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            return ABSENT
    return document


__all__ = ["ManifestError", "Problem", "apply_overrides", "check_runnable_locally", "load_manifest"]

_WRONG = {
    "missing": "is missing",
    "greater_than": "is too small",
    "greater_than_equal": "is too small",
    "less_than": "is too large",
    "less_than_equal": "is too large",
    "enum": "is not one of the allowed values",
    "literal_error": "is not one of the allowed values",
    "string_pattern_mismatch": "has the wrong form",
    "string_too_short": "is empty",
    "string_too_long": "is too long",
    "too_short": "has too few items",
    "too_long": "has too many items",
    "finite_number": "is not finite",
}
_KINDS: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "a mapping",
    list: "a list",
}


def _either(path: FieldPath, detail: ErrorDetails, document: dict[str, Any]) -> Problem:
    """The problem of a value that is a whole number or a string, and fits neither."""
    wrong = _WRONG.get(detail["type"])
    allowed = "a whole number or a string" if wrong is None else detail["msg"]
    return Problem(path_text(path), wrong or "has the wrong type", allowed, _at(document, path))


def _explain(detail: ErrorDetails, schema: Node, document: dict[str, Any]) -> Problem:
    path = tuple(part for part in detail["loc"] if part != "[key]")
    value, kind = _at(document, path), detail["type"]
    if kind == "extra_forbidden":
        return _unknown(path, schema, value)
    node = subschema(schema, path)
    allowed = _allowed(node)
    if kind.startswith(("less_than", "string_too_long")) and node is not None:
        allowed = describe(node, largest=True)
    if kind in _WRONG:
        return Problem(path_text(path), _WRONG[kind] + other_letters(value), allowed, value)
    found = "null" if value is None else _KINDS.get(type(value), type(value).__name__)
    quote = ' (write it in quotes: "...")' if kind == "string_type" and isinstance(value, int | float) else ""
    return Problem(path_text(path), f"is {found}{quote}{other_letters(value)}", allowed or detail["msg"], value)


def _allowed(node: Node | None) -> str:
    if node is None:
        return ""
    text = describe(node)
    return f"{text} with {', '.join(node['properties'])}" if text == "block" else text


def _unknown(path: FieldPath, schema: Node, value: Any) -> Problem:
    known = list((subschema(schema, path[:-1]) or {}).get("properties", {}))
    name = str(path[-1])
    plain = {re.sub(r"[-_]", "", other).lower(): other for other in known}
    wanted = re.sub(r"[-_]", "", name).lower()
    near = difflib.get_close_matches(wanted, plain, n=1, cutoff=0.6)
    elsewhere = [other for other in _paths(schema, ()) if other[-1] == name]
    # The very name one block further down is likelier than another name here.
    deeper = any(other[: len(path) - 1] == path[:-1] for other in elsewhere) and near[:1] != [wanted]
    if near and not deeper:
        wrong = f"unknown field{other_letters(name)}, did you mean {plain[near[0]]}?"
        return Problem(path_text(path), wrong, ", ".join(known), value)
    hint = f", there is {' and '.join(map(path_text, elsewhere[:3]))}" if elsewhere else ""
    return Problem(path_text(path), f"unknown field{hint}", ", ".join(known), value)


def _paths(node: Node, at: FieldPath) -> Iterator[FieldPath]:
    for name, child in node.get("properties", {}).items():
        yield (*at, name)
        yield from _paths(child, (*at, name))
