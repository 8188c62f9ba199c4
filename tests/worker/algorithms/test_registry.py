"""The registry, and the API's copy of its facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.algorithms import ALGORITHMS
from rljob_worker.algorithms import get_algorithm, register, registered
from rljob_worker.generate import generated_files

ROOT = Path(__file__).parents[3]


def test_the_api_knows_the_algorithms_that_are_registered() -> None:
    for name, text in generated_files().items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, f"{name} is stale: run `make generate`"
    assert list(ALGORITHMS) == list(registered())


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        register(get_algorithm("grpo"))
