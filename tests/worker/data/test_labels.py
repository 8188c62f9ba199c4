"""Labels of any type: the text that a right answer has, or a refusal by name."""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from rljob_api.spec import DataSource, RLJobSpec
from rljob_worker.data.dataset import PromptSource
from rljob_worker.data.labels import label_text
from rljob_worker.data.sources import load_source
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.errors import UserError

DAY = datetime.date(2024, 2, 29)
RIGHT: list[tuple[Any, str]] = [
    (pa.array([Decimal("18.90")]), "18.90"),
    (pa.array([Decimal("0.0000000001")], pa.decimal128(20, 10)), "0.0000000001"),
    (pa.array([DAY]), "2024-02-29"),
    (pa.array([DAY], pa.date64()), "2024-02-29"),
    (pa.array([datetime.datetime(2024, 2, 29, 12)]), "2024-02-29T12:00:00"),
    (pa.array([datetime.time(12, 30)]), "12:30:00"),
    (pa.array([b"7"]), "7"),
    (pa.array(["ü".encode()], pa.large_binary()), "ü"),
    (pa.array([b"7"], pa.binary(1)), "7"),
    (pa.array(["7"]).dictionary_encode(), "7"),
    (pa.array([b"7"]).dictionary_encode(), "7"),
    (pa.array([0.1], pa.float32()), "0.1"),
    (pa.array([np.float16(0.5)], pa.float16()), "0.5"),
    (pa.array([7], pa.uint8()), "7"),
    (pa.array([True]), "true"),
    (pa.array([[Decimal("1.50"), Decimal("2.00")]]), "[1.50, 2.00]"),
    (pa.array([{"a": DAY, "b": b"x", "c": None}]), '{"a": "2024-02-29", "b": "x", "c": null}'),
]
WRONG: list[tuple[Any, str]] = [
    (pa.array([1.0, float("nan")]), "row 1: the label .* is NaN"),
    (pa.array([1.0, float("inf")]), "row 1: the label .* is not finite"),
    (pa.array([1.0, float("nan")], pa.float32()), "row 1: the label .* is NaN"),
    (pa.array([[1.0], [float("nan")]]), "row 1: the label .* is NaN"),
    (pa.array([b"7", b"\xff"]), r"row 1: column 'label' \(spec\.data\.labelKey\) is bytes that are not UTF-8"),
    (pa.array([datetime.timedelta(1)] * 2), "row 0: the label .* is of type timedelta, which has no text"),
    (pa.array([2**60] * 2, pa.timestamp("us")), r"column 'label' \(timestamp\[us\]\) has a time that Python does not"),
    (pa.array([2**30] * 2, pa.date32()), r"column 'label' \(date32\[day\]\) has a time that Python does not"),
    (pa.array([0, 1], pa.timestamp("us", "No/Where")), r"tz=No/Where\]\) has a time that Python does not"),
    (pa.array([[2**60]] * 2, pa.list_(pa.timestamp("us"))), "column 'label' .* has a time that Python does not"),
    (pa.array(["a", None]), r"row 1: column 'label' \(spec\.data\.labelKey\) is null"),
]


def load(column: Any, folder: Path) -> Any:
    table = pa.table({"prompt": [f"p {i}" for i in range(len(column))], "label": column})
    parquet.write_table(table, folder / "x.parquet")
    return load_source(DataSource(path=str(folder / "x.parquet")), "spec.data")


@pytest.mark.parametrize(("column", "text"), RIGHT, ids=lambda value: str(getattr(value, "type", "")))
def test_a_label_is_its_text(column: Any, text: str, tmp_path: Path) -> None:
    assert label_text(load(column, tmp_path).rows[0]["label"]) == text


@pytest.mark.parametrize(("column", "message"), WRONG, ids=lambda value: str(getattr(value, "type", "")))
def test_what_has_no_text_is_named(column: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load(column, tmp_path)


@pytest.mark.parametrize(("label", "message"), [("NaN", "is NaN"), ("-Infinity", "is not finite"), ("[NaN]", "NaN")])
def test_json_lines_are_held_to_the_same(label: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"prompt": "a", "label": 1}}\n{{"prompt": "b", "label": {label}}}\n')
    with pytest.raises(UserError, match=rf"line 2 \(row 1\): the label \('label', spec\.data\.labelKey\) .*{message}"):
        load_source(DataSource(path=str(tmp_path / "x.jsonl")), "spec.data")


def test_other_values() -> None:
    assert label_text(uuid.UUID(int=0)) == "00000000-0000-0000-0000-000000000000"
    assert label_text({DAY: [("a", 1)]}) == '{"2024-02-29": [["a", 1]]}'
    assert label_text(json.loads('{"a": [1, "ü"]}')) == '{"a": [1, "ü"]}'
    for value in (object(), Decimal("NaN"), None, "half \ud83d"):
        with pytest.raises(ValueError, match=r"type object|NaN|null|half a character"):
            label_text(value)


def test_a_text_column_that_is_none_is_named(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff")])
    parquet.write_table(pa.table({"prompt": ["a"], "label": ["b"], "note": bad}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match="column 'note' is damaged, or no UTF-8"):
        load_source(DataSource(path=str(tmp_path / "x.parquet")), "spec.data")


def test_an_empty_label_is_one_for_a_reward_that_compares(
    make_spec: Callable[..., RLJobSpec], write_jsonl: Callable[..., str], tmp_path: Path
) -> None:
    data = {"path": write_jsonl([{"prompt": "a", "label": "x"}, {"prompt": "b", "label": " "}])}
    tokenizer = load_tokenizer(prepare_tokenizer(make_spec(data), tmp_path / "tokenizer"))
    with pytest.raises(UserError, match=r"line 2 \(row 1\): the label .* is empty, and the reward match compares"):
        PromptSource(make_spec(data), tokenizer)
    PromptSource(make_spec(data, reward={"name": "length"}), tokenizer)
