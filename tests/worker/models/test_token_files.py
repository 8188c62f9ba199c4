"""Tokens that the files of a model folder name, against its tokenizer and its embedding."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rljob_worker.errors import UserError
from rljob_worker.models.json_files import check_json_files

WORDS = {"a": 0, "b": 1, "<end>": 2}


def write(folder: Path, **files: dict[str, Any]) -> None:
    tokenizer = {"model": {"vocab": WORDS}, "added_tokens": [{"id": 3, "content": "<pad>"}]}
    given = {"config": {"vocab_size": 4}, "tokenizer": tokenizer, "tokenizer_config": {"eos_token": "<end>"}} | files
    for name, content in given.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config": {"eos_token": {"content": "<pad>"}, "model_max_length": 1e30}},
        {"tokenizer_config": {"eos_token": "<new>", "added_tokens_decoder": {"3": {"content": "<new>"}}},
         "config": {"vocab_size": 5}},
        {"generation_config": {"eos_token_id": [2, 3]}},
        {"tokenizer_config": {"chat_template": [{"name": "default", "template": "{{ messages }}"}]}},
        {"tokenizer_config": {"chat_template": {"default": "{{ messages }}"}}},
        {"tokenizer": {"model": {"vocab": [["a", 0.0], ["<end>", 0.0]]}}, "config": {"text_config": {"vocab_size": 2}}},
        {"tokenizer": {}, "tokenizer_config": {"eos_token": "</s>"}},
        {"config": {}, "tokenizer": {"model": {"vocab": WORDS}, "added_tokens": [{"id": 2**16, "content": "<x>"}]}},
        {"tokenizer": {"model": {"vocab": WORDS | {"<image>": 4}, "dropout": None}},
         "config": {"vision_config": {}, "text_config": {"vocab_size": 4}}},
    ],
)  # fmt: skip
def test_files_of_one_model(files: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, **files)
    check_json_files(tmp_path)


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ({"generation_config": {"eos_token_id": 4}}, r"generation_config\.json: eos_token_id 4 .* allowed: below 4"),
        ({"generation_config": {"eos_token_id": [2, 10**9]}}, r"generation_config\.json: eos_token_id 1000000000 "),
        ({"config": {"vocab_size": 3}}, "the tokenizer has 4 tokens, the model's embedding 3 "),
        ({"tokenizer": {"model": {"vocab": WORDS | {"far": 9}}}}, r"token 'far' has the number 9, .* is 4\)"),
        (
            {"tokenizer": {"model": {"vocab": WORDS}, "added_tokens": [{"id": 4, "content": "<x>"}]}},
            "'<x>' has the num",
        ),
        (
            {"tokenizer": {"model": {"vocab": WORDS, "dropout": 0.1}}},
            r"tokenizer\.json: model\.dropout 0\.1 makes other",
        ),
        (
            {"config": {}, "tokenizer": {"model": {"vocab": WORDS}, "added_tokens": [{"id": 2**31, "content": "<x>"}]}},
            r"tokenizer\.json: token '<x>' has the number 2147483648, and the tokenizer has 4 tokens; allowed: below ",
        ),
        (
            {
                "config": {"vision_config": {}, "vocab_size": 4},
                "tokenizer": {"model": {"vocab": WORDS | {"far": 10**9}}},
            },
            r"tokenizer\.json: token 'far' has the number 1000000000,",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"9" * 5000: {"content": "<x>"}}}},
            r"tokenizer_config\.json: token '<x>' has the number 9{40},",
        ),
        ({"tokenizer": {}, "added_tokens": {"<x>": 10**9}}, r"added_tokens\.json: token '<x>' has the number"),
        ({"tokenizer": {}, "vocab": {"a": 0, "<x>": 10**9}}, r"vocab\.json: token '<x>' has the number"),
        ({"tokenizer_config": {"eos_token": "<nope>"}}, r"tokenizer_config\.json: eos_token '<nope>' is no token of"),
        ({"tokenizer_config": {"model_max_length": "512"}}, r"tokenizer_config\.json: model_max_length is '512'"),
        ({"tokenizer_config": {"chat_template": 5}}, r"tokenizer_config\.json: chat_template holds no text"),
        ({"tokenizer_config": {"chat_template": [{"name": "a"}]}}, "chat_template holds no text"),
    ],
)
def test_files_of_several(files: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    write(tmp_path, **files)
    with pytest.raises(UserError, match=wrong):
        check_json_files(tmp_path)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "chat_template.jinja"])
def test_what_is_no_file_is_named(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    for make in (os.mkdir, os.mkfifo, lambda at: os.symlink("/dev/zero", at), lambda at: os.symlink("nowhere", at)):
        make(path)
        with pytest.raises(UserError, match=rf"{name}: cannot be read: (?:it )?is "):
            check_json_files(tmp_path)
        path.rmdir() if path.is_dir() else path.unlink()
