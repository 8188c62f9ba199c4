"""Answers that environments call valid, as clumsy ones name them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest
from environment_hosts import place_of

from rljob_worker.environments.base import MAX_EXAMPLES, checked_examples
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.environments.load import Source
from rljob_worker.errors import UserError


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, []), ([], []), (("up", "down"), ["up", "down"]), (range(3), ["0", "1", "2"]), ({"up": 1}, ["up"])],
)
def test_any_texts_are_taken(given: Iterable[object] | None, found: list[str]) -> None:
    assert checked_examples(given) == found


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("up", r"^examples is 'up' \(str\): a list of texts is needed"),
        (3, r"^examples is 3 \(int\): a list of texts is needed"),
        (["\ud800"], "no text: surrogates not allowed"),
        (itertools.repeat("up"), f"more than {MAX_EXAMPLES} texts"),
        (["x" * 2**21], "examples returned an observation of 2097152 bytes"),
    ],
)
def test_what_are_none_are_named(given: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        checked_examples(given)


def test_an_environment_with_such_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "class Odd:\n    examples = 'up'\n    def reset(self, *, seed, options): ...\n    def step(self, action): ...\n"
    )
    source = Source(python=f"{tmp_path}/odd.py:Odd")
    with (
        EnvironmentHosts(source, place_of(source, tmp_path)) as hosts,
        pytest.raises(UserError, match=r"^environment: examples is 'up'"),
    ):
        hosts.start()
