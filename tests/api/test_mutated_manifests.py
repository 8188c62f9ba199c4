"""The examples with blocks taken out, replaced or put in from others: valid, or refused by name, never an exception."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.validation import ManifestError, load_manifest

EXAMPLES = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
    if "kind: RLJob" in path.read_text()
}
MUTANTS = 400
PYTHONS = re.compile(r"object at 0x|namespace\(|<class |Traceback")
ODD: list[Any] = [{}, [], None, 0, -1, "", 1.5, True, "x", [{}]]
Place = tuple[Any, ...]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*at, key)
        yield from places(part, (*at, key))


def at(document: Any, place: Place) -> Any:
    for key in place:
        document = document[key]
    return document


def put(document: dict[str, Any], place: Place, value: Any) -> None:
    """Nothing where a list or a value stands in the way."""
    for key in place[:-1]:
        document = document.setdefault(key, {}) if isinstance(document, dict) else {}
    if isinstance(document, dict):
        document[place[-1]] = copy.deepcopy(value)


BLOCKS = [
    (place, at(example, place))
    for example in EXAMPLES.values()
    for place in places(example)
    if place[0] == "spec" and 2 <= len(place) <= 4 and "config" not in place
]


def mutant(draws: random.Random) -> tuple[dict[str, Any], list[Any]]:
    name = draws.choice(sorted(EXAMPLES))
    document, done = copy.deepcopy(EXAMPLES[name]), list[Any]([name])
    for _ in range(draws.randint(1, 3)):
        place = draws.choice([place for place in places(document) if place[0] == "spec" and len(place) > 1])
        kind, holder = draws.random(), at(document, place[:-1])
        if kind < 0.35:
            del holder[place[-1]]
            done.append(("without", place))
        elif kind < 0.5:
            holder[place[-1]] = copy.deepcopy(draws.choice(ODD))
            done.append(("is", place, holder[place[-1]]))
        else:
            block = draws.choice(BLOCKS)
            put(document, *block)
            done.append(("with", *block))
    return document, done


def refusal(document: dict[str, Any]) -> str:
    """Return the refusal of it; empty where it is valid."""
    try:
        load_manifest(document)
    except ManifestError as error:
        return str(error)
    return ""


def test_no_mutant_of_an_example_ends_in_pythons_own_error() -> None:
    draws, refused = random.Random(43), 0
    for _ in range(MUTANTS):
        document, done = mutant(draws)
        try:
            said = refusal(document)
        except Exception as error:
            raise AssertionError(done) from error
        refused += bool(said)
        assert not PYTHONS.search(said), (done, said)
    assert 0.3 < refused / MUTANTS < 0.95


@pytest.mark.parametrize(
    ("name", "place", "value", "said"),
    [
        ("quickstart", ("spec", "data", "environment"), {"name": "FrozenLake"}, "spec.data"),
        ("frozen-lake", ("spec", "episodes"), None, "spec.episodes"),
        ("qwen3.5-9b-grpo-8xnpu-async", ("spec", "resources", "rollout"), {"devicesPerNode": 1}, "spec.rollout"),
    ],
)
def test_a_value_that_another_one_needs_is_named(name: str, place: Place, value: Any, said: str) -> None:
    document = copy.deepcopy(EXAMPLES[name])
    put(document, place, value)
    assert said in refusal(document)
