"""Files that are not what their name says: called by what they are."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rljob_api.spec import DataSource
from rljob_worker.data.chat import read_template
from rljob_worker.data.sources import check_head, load_source
from rljob_worker.errors import UserError
from rljob_worker.host.encodings import what_it_is
from rljob_worker.models.generation_config import FILE
from rljob_worker.models.json_files import check_json_files, read_json_object

ROW = '{"prompt": "a", "label": "1"}\n'
NAMED: list[tuple[bytes, str]] = [
    (ROW.encode("utf-16"), "is UTF-16; JSON lines in UTF-8 are needed .*iconv -f UTF-16"),
    (ROW.encode("utf-16-le"), "is UTF-16"),
    (ROW.encode("utf-16-be"), "is UTF-16"),
    (ROW.encode("utf-32"), "is UTF-32"),
    (ROW.encode("utf-32-le"), "is UTF-32"),
    (gzip.compress(ROW.encode()), "is compressed by gzip; .*gunzip"),
    (bz2.compress(ROW.encode()), "is compressed by bzip2"),
    (lzma.compress(ROW.encode()), "is compressed by xz"),
    (b"\x28\xb5\x2f\xfd....", "is compressed by zstd"),
    (b"PK\x03\x04....", "is a ZIP archive"),
    (b"PAR1....", r"is a Parquet file; .*ends with \.parquet"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a pointer of Git LFS"),
    (b"[\n" + ROW.encode() + b"]", "line 1: not valid JSON: .*the file is one list"),
    (b'[{"prompt": "a"}]', "line 1: a JSON object is needed, not list"),
    (b'{"prompt": "a", "prompt": "b", "label": "1"}', "line 1: not valid JSON: key 'prompt' stands twice"),
]


@pytest.mark.parametrize(("content", "message"), NAMED, ids=[message for _, message in NAMED])
def test_a_data_file_is_called_by_what_it_is(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    source = DataSource(path=str(tmp_path / "x.jsonl"))
    for judged in (check_head, load_source):
        with pytest.raises(UserError, match=message):
            judged(source, "spec.data")


def test_a_mark_before_utf_8_and_line_ends_of_windows_are_no_matter(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + (ROW + "\n" + ROW).replace("\n", "\r\n").encode())
    source = DataSource(path=str(tmp_path / "x.jsonl"))
    check_head(source, "spec.data")
    loaded = load_source(source, "spec.data")
    assert len(loaded.rows) == len(loaded.row_hashes()) == 2
    assert loaded.row_hashes()[0] == loaded.row_hashes()[1]


def test_a_first_row_of_any_length_is_one(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "' + "a" * 2**21 + '", "label": "1"}\n' + ROW)
    source = DataSource(path=str(tmp_path / "x.jsonl"))
    check_head(source, "spec.data")
    assert len(load_source(source, "spec.data").rows) == 2
    (tmp_path / "x.jsonl").write_text('{"prompt": "' + "a" * 2**21 + "\n" + ROW)
    with pytest.raises(UserError, match="line 1: not valid JSON"):
        check_head(source, "spec.data")


def test_a_parquet_name_on_something_else(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(gzip.compress(b"x"))
    with pytest.raises(UserError, match="it is compressed by gzip; a Parquet file is needed"):
        load_source(DataSource(path=str(tmp_path / "x.parquet")), "spec.data")


def test_a_template_in_utf_16(tmp_path: Path) -> None:
    source = DataSource(path="x", applyChatTemplate=True, chat={"templateFile": str(tmp_path / "a")})  # type: ignore[arg-type]
    (tmp_path / "a").write_text("{{ messages }}", encoding="utf-16")
    with pytest.raises(UserError, match=r"spec\.data\.chat\.templateFile: .*a is UTF-16"):
        read_template(source, "spec.data")
    (tmp_path / "a").write_text("{{ messages }}", encoding="utf-8-sig")
    assert read_template(source, "spec.data") == "{{ messages }}"


def test_plain_text_is_nothing_else() -> None:
    for text in ("", "a", ROW, "é" * 50, "\u4f60\u597d" * 20, '{"a": "\\u0000"}'):
        assert what_it_is(text.encode()) == ""


@pytest.mark.parametrize(
    "name", [FILE, "config.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"]
)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "must hold a JSON object, got list"),
        (b'{"eos_token_id": 2, "tem', "not valid JSON: the file is cut off"),
        (b'{"eos_token_id": ', "not valid JSON: the file is cut off"),
        (b"", "not valid JSON: the file is empty"),
        ('{"a": 1}'.encode("utf-16"), "is UTF-16; UTF-8 is needed"),
        (b'{"a": "\xff"}', "not valid JSON: not UTF-8: invalid start byte at byte 7"),
        (b'{"a" 1}', "not valid JSON: Expecting"),
    ],
)
def test_a_file_of_a_model_folder_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: {message}"):
        check_json_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (FILE, {"eos_token_id": "<|im_end|>"}, "eos_token_id is '<|im_end|>': a token's number"),
        (FILE, {"eos_token_id": [2, None]}, r"eos_token_id is \[2, None\]"),
        ("chat_template.json", {"template": "x"}, "chat_template is NoneType"),
    ],
)
def test_a_value_that_its_reader_fails_at_is_named(name: str, value: object, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(value))
    with pytest.raises(UserError, match=message.replace("|", r"\|")):
        check_json_files(tmp_path)


def test_what_is_right_and_what_nobody_reads_is_taken(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b'\xef\xbb\xbf{"eos_token_id": [1, 2], "pad_token_id": null}')
    (tmp_path / "trainer_state.json").write_text("[")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    check_json_files(tmp_path)
    assert read_json_object(tmp_path / FILE)["eos_token_id"] == [1, 2]
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-16")
    with pytest.raises(UserError, match=r"chat_template\.jinja: is UTF-16"):
        check_json_files(tmp_path)


def test_texts_that_arrow_keeps_as_views_are_read_as_others(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b"], "label": ["1", "2"], "turns": [[{"said": "x"}], []]})
    views = pa.schema([("prompt", pa.string_view()), ("label", pa.string_view()), table.schema.field("turns")])
    pq.write_table(table.cast(views), tmp_path / "views.parquet")
    loaded = load_source(DataSource(path=str(tmp_path / "views.parquet")), "spec.data")
    assert [row["prompt"] + row["label"] for row in loaded.rows] == ["a1", "b2"]
    assert loaded.rows[0]["turns"] == [{"said": "x"}]


def test_a_column_that_is_there_twice_is_named(tmp_path: Path) -> None:
    arrays = [pa.array(["a"]), pa.array(["b"]), pa.array(["1"])]
    pq.write_table(pa.Table.from_arrays(arrays, names=["prompt", "prompt", "label"]), tmp_path / "twice.parquet")
    with pytest.raises(UserError, match=r"twice\.parquet has two columns called 'prompt'"):
        load_source(DataSource(path=str(tmp_path / "twice.parquet")), "spec.data")


def test_a_key_into_a_map_is_named_as_such(tmp_path: Path) -> None:
    maps = pa.array([[("truth", "1")]], pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table({"prompt": ["a"], "of": maps}), tmp_path / "map.parquet")
    source = DataSource.model_validate({"path": str(tmp_path / "map.parquet"), "labelKey": "of.truth"})
    with pytest.raises(UserError, match=r"column 'of.truth' .* is absent: 'of' is a map, whose keys are no fields"):
        load_source(source, "spec.data")


def test_marks_of_files_that_were_joined_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "joined.jsonl").write_bytes(codecs.BOM_UTF8 + ROW.encode() + codecs.BOM_UTF8 + ROW.encode())
    assert len(load_source(DataSource(path=str(tmp_path / "joined.jsonl")), "spec.data").rows) == 2


def test_zeros_behind_the_last_row_are_no_encoding(tmp_path: Path) -> None:
    """A file that was cut off while its blocks were written, as a full disk or a lost node leaves it."""
    assert what_it_is(ROW.encode() + bytes(4096)) == ""
    (tmp_path / "cut.jsonl").write_bytes(ROW.encode() + bytes(4096))
    with pytest.raises(UserError, match=r"cut\.jsonl, line 2: not valid JSON"):
        load_source(DataSource(path=str(tmp_path / "cut.jsonl")), "spec.data")
