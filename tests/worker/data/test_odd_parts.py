"""Messages with pictures, as tables and clumsy data sets have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from rljob_api.spec import DataSource
from rljob_worker.data.chat import ChatTemplate
from rljob_worker.data.places import with_places
from rljob_worker.data.sources import load_source

PART = pa.struct([("type", pa.string()), ("text", pa.string()), ("image", pa.string())])
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' or 'image' in part %}<P>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
"""A part that has the key `image` is a picture, as in the template of Qwen2.5-VL."""


class Tokenizer:
    chat_template = TEMPLATE
    special_tokens_map: dict[str, str] = {}

    def get_chat_template(self, own: str | None, tools: Any = None) -> str:
        return own or TEMPLATE


def test_a_part_has_no_keys_of_other_parts(tmp_path: Path) -> None:
    """A table has all keys in all parts: with `image: null`, a text would be a picture."""
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what"}]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(PART))]))
    path = tmp_path / "rows.parquet"
    parquet.write_table(
        pa.table({"prompt": pa.array([[{"role": "user", "content": parts}]], kind), "images": ["a.png"]}), path
    )
    source = DataSource.model_validate(
        {"path": str(path), "labelKey": None, "imageKey": "images", "applyChatTemplate": True}
    )
    (row,) = load_source(source, "spec.data").rows
    assert row["prompt"][0]["content"][1]["image"] is None
    made = ChatTemplate(source, "spec.data", Tokenizer(), None)  # type: ignore[arg-type]
    assert made.messages(row["prompt"]) == [{"role": "user", "content": parts}]


def test_pictures_without_a_place_are_named() -> None:
    messages = [{"role": "system", "content": "see"}, {"role": "tool", "content": "it"}]
    with pytest.raises(ValueError, match=r"has 1 picture, and no message of the user or place \(<image>\) for them"):
        with_places(messages, 1)
