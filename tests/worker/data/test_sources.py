from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from pyarrow import parquet

from rljob_api.spec import DataSource, Hub, RLJobSpec
from rljob_worker.data.hub import hub_failure
from rljob_worker.data.labels import label_text
from rljob_worker.data.sources import load_source, load_sources
from rljob_worker.errors import UserError

ROWS = [{"prompt": f"p {i}", "label": str(i), "level": i} for i in range(5)]


def source(path: object, **fields: Any) -> DataSource:
    return DataSource.model_validate({"path": str(path)} | fields)


def fails(path: object, *parts: str, **fields: Any) -> None:
    with pytest.raises(UserError) as caught:
        load_source(source(path, **fields), "spec.data")
    for part in parts:
        assert part in str(caught.value)


def test_jsonl(write_jsonl: Callable[..., str]) -> None:
    loaded = load_source(source(write_jsonl(ROWS)), "spec.data")
    assert loaded.name == "data"
    assert list(loaded.rows) == ROWS


def test_jsonl_keeps_unicode_line_separators_and_skips_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes('{"prompt": "a\u2028b", "label": "1"}\n\n  \r\n{"prompt": "ü", "label": "2"}'.encode())
    assert [row["prompt"] for row in load_source(source(path), "spec.data").rows] == ["a\u2028b", "ü"]


def test_parquet(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=2)
    loaded = load_source(source(tmp_path / "rows.parquet"), "spec.data")
    assert loaded.name == "rows"
    assert [loaded.rows[i] for i in (4, 0, -1)] == [ROWS[4], ROWS[0], ROWS[4]]
    assert list(loaded.rows) == ROWS
    assert loaded.rows[1:3] == ROWS[1:3]
    with pytest.raises(IndexError):
        loaded.rows[5]


def test_dataset_folder(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    dataset = Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "flat")
    DatasetDict({"train": dataset, "test": dataset.select([3, 1])}).save_to_disk(tmp_path / "splits")
    assert list(load_source(source(tmp_path / "flat"), "spec.data").rows) == ROWS
    test = load_source(source(tmp_path / "splits", split="test"), "spec.data")
    assert list(test.rows) == [ROWS[3], ROWS[1]]
    train = load_source(source(tmp_path / "splits"), "spec.data")
    assert train.fingerprint == load_source(source(tmp_path / "flat"), "spec.data").fingerprint != test.fingerprint
    fails(tmp_path / "splits", "spec.data.split", "'dev'", "train, test", split="dev")
    fails(tmp_path, "save_to_disk", str(tmp_path))


def test_synthetic() -> None:
    data = DataSource.model_validate({"synthetic": {"rows": 10}, "promptKey": "q", "labelKey": "a"})
    loaded = load_source(data, "spec.data")
    assert loaded.name == "RepeatLast"
    assert len(loaded.rows) == 10
    assert loaded.rows[0].keys() == {"q", "a"}


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a", "label": "1"}\n\n{"prompt": "b", "label" "2"}\n')
    fails(path, f"{path}, line 3", "not valid JSON", "column 25")
    path.write_bytes(b'{"prompt": "a", "label": "\xff"}\n')
    fails(path, f"{path}, line 1", "not valid UTF-8")
    path.write_text('{"prompt": "a", "label": "1"}\n["b"]\n')
    fails(path, "line 2", "a JSON object is needed, not list")
    path.write_text('{"prompt": "a", "label": "1", "more": ' + "[" * 101 + "]" * 101 + "}\n")
    fails(path, "line 1", "nested deeper than 100 levels")
    path.write_text('{"prompt": "a", "label": ' + "[" * 900 + "1" + "]" * 900 + "}\n")
    fails(path, "line 1", "nested deeper than 100 levels")
    path.write_text('{"prompt": "a", "label": "' + "[{" * 300 + '"}\n')
    assert len(load_source(DataSource(path=str(path)), "spec.data").rows) == 1


def test_a_missing_key_is_named_with_its_row_and_the_keys_there_are(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([*ROWS, {"prompt": "x", "answer": "1"}])
    fails(path, f"{path}, line 6 (row 5)", "'label' (spec.data.labelKey) is absent", "'prompt', 'answer'")
    fails(
        path, "line 1 (row 0)", "'question' (spec.data.promptKey)", "'prompt', 'label', 'level'", promptKey="question"
    )
    fails(write_jsonl([{"prompt": "x", "label": None}], "null.jsonl"), "'label' (spec.data.labelKey) is null")
    assert len(load_source(source(path, labelKey=None), "spec.data").rows) == 6


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.Table.from_pylist([*ROWS, {"prompt": "x", "label": None}]), path)
    fails(path, "column 'answer' (spec.data.labelKey) is absent", "'prompt', 'label', 'level'", labelKey="answer")
    fails(path, f"{path}, row 5: column 'label' (spec.data.labelKey) is null")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("  ", "the prompt ('prompt') is empty"),
        (3, "the prompt ('prompt') is int"),
        ([], "needs a 'role' and a 'content'"),
        ([{"role": "user"}], "needs a 'role' and a 'content'"),
        ([{"role": "user", "content": "hi"}], "set spec.data.applyChatTemplate: true"),
    ],
)
def test_a_wrong_prompt_is_named(write_jsonl: Callable[..., str], prompt: Any, message: str) -> None:
    fails(write_jsonl([ROWS[0], {"prompt": prompt, "label": "1"}]), "line 2 (row 1)", message)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    fails(tmp_path / "no.jsonl", "spec.data.path", f"{tmp_path}/no.jsonl does not exist")
    fails(tmp_path / "no.parquet", "does not exist")
    fails(tmp_path / "no", "does not exist")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    fails(tmp_path / "empty.jsonl", "is empty")
    parquet.write_table(
        pa.table({"prompt": pa.array([], pa.string()), "label": pa.array([], pa.string())}), tmp_path / "e.parquet"
    )
    fails(tmp_path / "e.parquet", "is empty")
    (tmp_path / "bad.parquet").write_text("no parquet")
    fails(tmp_path / "bad.parquet", "bad.parquet is not a readable Parquet file")
    (tmp_path / "rows.csv").write_text("prompt,label\n")
    fails(tmp_path / "rows.csv", "not a .jsonl or .parquet file")
    (tmp_path / "folder.jsonl").mkdir()
    fails(tmp_path / "folder.jsonl", "is not a file")


def test_the_fingerprint_is_of_the_content(write_jsonl: Callable[..., str], tmp_path: Path) -> None:
    one = load_source(source(write_jsonl(ROWS)), "spec.data").fingerprint
    assert one == load_source(source(write_jsonl(ROWS, "copy.jsonl")), "spec.data").fingerprint
    assert one != load_source(source(write_jsonl(ROWS[::-1])), "spec.data").fingerprint


def test_two_sources_of_one_name_are_refused(
    make_spec: Callable[..., RLJobSpec], write_jsonl: Callable[..., str]
) -> None:
    path = write_jsonl(ROWS)
    with pytest.raises(
        UserError, match=re.escape("spec.data.sources[1].name: 'data' is the name of spec.data.sources[0]")
    ):
        load_sources(make_spec({"sources": [{"path": path}, {"path": path}]}))
    spec = make_spec({"sources": [{"path": path}, {"path": path, "name": "again"}]})
    assert [s.name for s in load_sources(spec)] == ["data", "again"]


def test_modelscope_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    fails("owner/data", "spec.data.hub", "'modelscope'", "pip install modelscope", hub="ModelScope")


@pytest.mark.parametrize("how", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}])
def test_a_hub_that_cannot_be_reached_is_named_and_tried_again(how: dict[str, str], tmp_path: Path) -> None:
    # In a process of its own, because the hub's client reads its settings when it is imported.
    program = (
        "from rljob_api.spec import DataSource; from rljob_worker.data.sources import load_source;"
        "load_source(DataSource(path='owner/no-such-data'), 'spec.data')"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HOME": str(tmp_path)} | how
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert "JobError: spec.data.path: 'owner/no-such-data' is not a local path" in ended.stderr
    assert "fetching it from HuggingFace failed" in ended.stderr


def test_what_a_hub_refuses_is_the_users() -> None:
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    for kind, error in ((GatedRepoError, UserError), (RepositoryNotFoundError, UserError)):
        assert type(hub_failure("a/b", Hub.HUGGING_FACE, "spec.model", kind.__new__(kind))) is error
    unreachable = LocalEntryNotFoundError("cannot reach the hub")
    for passes in (unreachable, httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("cut off"), OSError("reset")):
        assert hub_failure("a/b", Hub.HUGGING_FACE, "spec.model", passes).exit_code == 1
    assert hub_failure("a/b", Hub.HUGGING_FACE, "spec.model", ValueError("no such split")).exit_code == 2


@pytest.mark.parametrize(
    ("value", "text"), [("x y", "x y"), (3, "3"), (0.5, "0.5"), (True, "true"), ([1, "ü"], '[1, "ü"]')]
)
def test_labels_become_text(value: Any, text: str) -> None:
    assert label_text(value) == text


VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"what is {i} + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"split": "train", "index": i},
    }
    for i in range(3)
]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_verls_rows_are_read_as_they_are(kind: str, tmp_path: Path, write_jsonl: Callable[..., str]) -> None:
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(VERL), tmp_path / "train.parquet")
    path = tmp_path / "train.parquet" if kind == "parquet" else write_jsonl(VERL)
    loaded = load_source(source(path, labelKey="reward_model.ground_truth", applyChatTemplate=True), "spec.data")
    assert [row["reward_model.ground_truth"] for row in loaded.rows] == ["1", "2", "3"]
    assert [row["extra_info"]["index"] for row in loaded.rows] == [0, 1, 2]
    fails(path, "'reward_model.truth'", "is absent", labelKey="reward_model.truth", applyChatTemplate=True)
    fails(path, "'data_source.x'", "is absent", labelKey="data_source.x", applyChatTemplate=True)
    plain = source(path, labelKey="data_source", applyChatTemplate=True)
    assert load_source(plain, "spec.data").fingerprint == loaded.fingerprint
