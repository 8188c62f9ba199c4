"""Halves of characters in JSONL: JSON's escapes can say them, and no tokenizer or file takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rljob_api.spec import DataSource
from rljob_worker.data.sources import load_source
from rljob_worker.errors import UserError


def load(path: Path, *rows: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(load_source(DataSource.model_validate({"path": str(path), **settings}), "spec.data").rows)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a \ud800", "label": "b"},
        {"prompt": "a", "label": "\udfff"},
        {"prompt": [{"role": "user", "content": "x \ud83d y"}], "label": "b"},
        {"prompt": "a", "label": "b", "more": ["\udc00"]},
        {"prompt": "a", "label": "b", "\ud9ab": 1},
    ],
)
def test_are_refused_with_their_line(tmp_path: Path, row: dict[str, Any]) -> None:
    good = {"prompt": "\U0001f600 whole", "label": "\\ud800 in so many letters"}
    if isinstance(row["prompt"], list):
        good["prompt"] = [{"role": "user", "content": good["prompt"]}]  # type: ignore[assignment]
    chat = {"applyChatTemplate": isinstance(row["prompt"], list)}
    assert load(tmp_path / "good.jsonl", good, **chat) == [good]
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2: holds half a character"):
        load(tmp_path / "bad.jsonl", good, row, **chat)
