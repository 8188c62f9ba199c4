"""Files of tokens and their log-probabilities."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rljob_worker.errors import UserError
from rljob_worker.host.files import WriteFailures
from rljob_worker.records.token_files import SampleTokens, digest, read_tokens, write_tokens

ROW = {"ordinal": 3, "sample": 1, "response": "a b"}
HOSTILE = "</script><script>x()</script>\x1b[2J\u202e\ud800\n"


def sample(**changes: Any) -> SampleTokens:
    values: dict[str, Any] = {"ordinal": 3, "sample": 1, "response": digest("a b"), "texts": ["a", " b"]}
    return SampleTokens(**{**values, "engine": [-0.123456789, -2.0], "differences": [1.23456e-6, -0.5], **changes})


def written(folder: Path, *samples: SampleTokens) -> Path:
    path = write_tokens(folder, 5, samples, WriteFailures())
    assert path is not None
    return path


def test_tokens_come_back_with_few_digits_and_differences_that_are_small_keep_theirs(tmp_path: Path) -> None:
    written(tmp_path, sample(), sample(sample=0, texts=[HOSTILE, "x"], differences=None))
    tokens = read_tokens(tmp_path, 5)
    found = tokens.of(ROW)
    assert found is not None
    assert (found.texts, found.engine, found.differences) == (["a", " b"], [-0.1235, -2.0], [1.23e-6, -0.5])
    assert found.trainer == [-0.1235 + 1.23e-6, -2.5]
    other = tokens.of({**ROW, "sample": 0})
    assert other is not None
    assert (other.texts, other.trainer) == ([HOSTILE, "x"], None)


def test_a_folder_of_an_older_version_has_none_and_neither_has_another_response(tmp_path: Path) -> None:
    assert read_tokens(tmp_path, 5).of(ROW) is None
    assert write_tokens(tmp_path, 5, [], WriteFailures()) is None
    assert not (tmp_path / "tokens").exists()
    written(tmp_path, sample())
    tokens = read_tokens(tmp_path, 5)
    assert tokens.of({**ROW, "response": "a c"}) is None, "of another attempt"
    assert tokens.of({**ROW, "ordinal": 4}) is None
    assert tokens.of({"sample": 1, "response": "a b"}) is None, "a row of an older version has no ordinal"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "damaged"),
        ([{"version": 2}], "version 2 of the format; this RLJob reads versions up to 1"),
        ([{"version": 1}, {"ordinal": 1}], "damaged: KeyError"),
        ([{"version": 1}, {**sample().to_json(), "engine": [-1.0]}], "2 tokens with 1 numbers"),
        ([{"version": 1}, {**sample().to_json(), "differences": [1.0]}], "2 tokens with 1 numbers"),
        ([{"version": 1}, {**sample().to_json(), "differences": [1.0, None]}], "damaged: TypeError"),
        ([{"version": 1}, {**sample().to_json(), "engine": [-1.0, float("nan")]}], "not finite"),
        ([{"version": 1}, {**sample().to_json(), "texts": ["a", 1]}], "a token whose text is none"),
        ([[1], 2], "damaged"),
        (["x", "y"], "damaged"),
    ],
)
def test_a_file_that_is_damaged_or_newer_is_named(tmp_path: Path, lines: list[Any], said: str) -> None:
    path = written(tmp_path, sample())
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    with pytest.raises(UserError, match=said) as raised:
        read_tokens(tmp_path, 5)
    assert str(path) in str(raised.value)
