"""Columns of Parquet files whose types are unusual: each is read, or named before a row of it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from rljob_api.spec import DataSource
from rljob_worker.data.sources import LoadedSource, load_source
from rljob_worker.errors import UserError

MESSAGE = {"role": "user", "content": "one"}
JSON_LIST = '[{"role": "user", "content": "one"}]'


def loaded(folder: Path, columns: dict[str, Any], **keys: Any) -> LoadedSource:
    path = folder / "rows.parquet"
    parquet.write_table(pa.table(columns), path)
    return load_source(DataSource.model_validate({"path": str(path), **keys}), "spec.data")


@pytest.mark.parametrize("seconds", [[0, 2**62], [[2**62], []]])
def test_a_duration_that_python_does_not_have_is_named(tmp_path: Path, seconds: list[Any]) -> None:
    kind = pa.duration("s") if isinstance(seconds[0], int) else pa.list_(pa.duration("s"))
    columns = {"prompt": ["one", "two"], "label": ["1", "2"], "took": pa.array(seconds, kind)}
    with pytest.raises(UserError, match=r"column 'took' \(.*duration\[s\].*\) has a time that Python does not"):
        loaded(tmp_path, columns)


def test_durations_that_it_has_are_read(tmp_path: Path) -> None:
    columns = {"prompt": ["one", "two"], "label": ["1", "2"], "took": pa.array([1, None], pa.duration("s"))}
    assert [row["took"] and row["took"].total_seconds() for row in loaded(tmp_path, columns).rows] == [1, None]


def test_text_that_is_said_to_be_json_is_text(tmp_path: Path) -> None:
    labels = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["1", "2"]))
    prompts = pa.ExtensionArray.from_storage(pa.json_(), pa.array([JSON_LIST] * 2))
    found = loaded(tmp_path, {"prompt": prompts, "label": labels}, applyChatTemplate=True)
    assert [row["label"] for row in found.rows] == ["1", "2"]
    assert found.facts.roles == {"user": f"{tmp_path}/rows.parquet, row 0"}


def test_messages_may_be_lists_of_one_length(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]), 1)
    prompts = pa.array([[MESSAGE]] * 2, kind)
    found = loaded(tmp_path, {"prompt": prompts, "label": ["1", "2"]}, applyChatTemplate=True)
    assert [row["prompt"] for row in found.rows] == [[MESSAGE]] * 2


def test_a_name_of_a_column_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": ["one"], "label": ["1"], "odd_name": [1]}), path)
    path.write_bytes(path.read_bytes().replace(b"odd_name", b"odd_nam\xff"))
    with pytest.raises(UserError, match=r"^spec.data.path: .*rows.parquet is not a readable Parquet file: .*0xff"):
        load_source(DataSource.model_validate({"path": str(path)}), "spec.data")
