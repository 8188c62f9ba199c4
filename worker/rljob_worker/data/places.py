"""Places of pictures in a prompt, as text and chat templates have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljob_api.how_many import how_many
from rljob_worker.models.pictures import MARK

IN_TEXT = "<image>"
"""Place of a picture in a prompt's text; a prompt without it has its pictures before its text."""


def with_places(messages: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Messages with a part for each of a row's pictures, as chat templates take them.

    Where the texts have `<image>`, pictures are there; where content has parts of pictures already, it stays; else they
    are before the text of the first message of the user.

    Raises:
        ValueError: there are places for another number of pictures.
    """
    texts = [message["content"] for message in messages if isinstance(message["content"], str)]
    parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
    marked = sum(text.count(IN_TEXT) for text in texts)
    there = sum(part.get("type") == "image" for part in parts)
    if not marked and not there and count:
        first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise ValueError(
                f"has {how_many(count, 'picture')}, and no message of the user or place ({IN_TEXT}) for them"
            )
        content = messages[first]["content"]
        told = content if isinstance(content, list) else [{"type": "text", "text": content}]
        placed = {**messages[first], "content": [*({"type": "image"} for _ in range(count)), *told]}
        return [*messages[:first], placed, *messages[first + 1 :]]
    if marked + there != count:
        raise ValueError(f"has {how_many(count, 'picture')}, and its prompt places for {marked + there} ({IN_TEXT})")
    return [{**message, "content": _split(message["content"])} for message in messages]


def _split(content: object) -> object:
    if not isinstance(content, str) or IN_TEXT not in content:
        return content
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(IN_TEXT)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def text_with_places(text: str, count: int) -> str:
    """The same for a prompt without a chat template: pictures where it has `<image>`, or before it."""
    marked = text.count(IN_TEXT)
    if not marked or not count:
        return MARK * count + (" " if count else "") + text
    if marked != count:
        raise ValueError(f"has {how_many(count, 'picture')}, and its prompt places for {marked} ({IN_TEXT})")
    return text.replace(IN_TEXT, MARK)
