"""A prompt as a data set has it: text, a list of chat messages, or such a list as JSON text."""

from __future__ import annotations

import json
import re
from typing import Any

from rljob_api.spec import DataSource
from rljob_worker.data.labels import check_text
from rljob_worker.errors import UserError

Messages = list[dict[str, Any]]
ASSISTANT = "assistant"
_INSTRUCTIONS = {"system", "developer"}
"""Roles whose messages alone ask nothing."""
_LIKE_MESSAGES = re.compile(r"""\s*"?\s*\[\s*\{\s*\\?["'](role|content|from|value)\\?["']\s*:""")
"""The beginning of text that someone wrote a list of chat messages as, rightly or not."""
_SHAREGPT = {"from", "value"}
"""Keys of a message as ShareGPT has them."""
_LENIENT = json.JSONDecoder(strict=False)
"""Takes line breaks inside strings as they are."""
_OPENING = frozenset('[{"')
_FURTHER_LOOK = _OPENING | frozenset(["", *" \t\n\r\v\f\x1c\x1d\x1e\x1f"])
"""First characters of what may be messages, or be empty."""
_SHOWN = 60


def parsed_prompt(prompt: str | Messages) -> str | Messages:
    """The prompt itself, or the list of chat messages that a string is the JSON text of.

    Line breaks inside strings may stand as they are: published data sets have them so. A prompt that is some other JSON
    is text.

    Raises:
        ValueError: it begins like a list of messages and is none.
    """
    if not isinstance(prompt, str) or not _may_hold_messages(prompt):
        return prompt
    try:
        value = _LENIENT.decode(prompt)
    except (ValueError, RecursionError) as error:
        if _LIKE_MESSAGES.match(prompt) is None:
            return prompt
        raise ValueError(f"looks like chat messages, but is no JSON text of them ({error}): {_short(prompt)}") from None
    if isinstance(value, list) and any(isinstance(item, dict) and "role" in item for item in value):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) and item.keys() >= _SHAREGPT for item in value):
        raise ValueError(f"has messages with 'from' and 'value'; 'role' and 'content' are needed: {_short(prompt)}")
    if isinstance(value, str) and _may_hold_messages(value):
        raise ValueError(f"has chat messages as JSON text inside JSON text, written twice: {_short(prompt)}")
    if isinstance(value, dict) and ({"role", "content"} <= value.keys() or isinstance(value.get("messages"), list)):
        raise ValueError(f"is the JSON text of an object, not of a list of chat messages: {_short(prompt)}")
    return prompt


def _may_hold_messages(text: str) -> bool:
    return text.lstrip()[:1] in _OPENING and (
        ("role" in text and "content" in text) or ("from" in text and "value" in text)
    )


def is_plain(text: object) -> bool:
    """Whether it is text that needs no further look: most prompts are, and a data set has millions."""
    return type(text) is str and text.isascii() and text[:1] not in _FURTHER_LOOK


def check_prompt(prompt: object, place: str, field: str, source: DataSource) -> Messages | None:
    """Refuse what is neither text nor chat messages of text that ask something; `place` names the row.

    Returns:
        The messages, where it has some; without a chat template their JSON text is the prompt.

    Raises:
        UserError: says what is wrong, and what would be right.
    """
    named = f"{place}: the prompt ({source.prompt_key!r})"
    if not isinstance(prompt, str | list):
        raise UserError(f"{named} is {type(prompt).__name__}: a string or a list of chat messages is needed")
    try:
        value = parsed_prompt(prompt)
        if isinstance(value, str):
            if not value.isascii():
                check_text(value)
        else:
            _check_messages(value, source)
    except ValueError as error:
        raise UserError(f"{named} {error}") from None
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{named} is empty")
        return None
    if not source.apply_chat_template and isinstance(prompt, list):
        raise UserError(f"{named} is a list of chat messages: set {field}.applyChatTemplate: true")
    return value


def _check_messages(messages: list[Any], source: DataSource) -> None:
    if not messages:
        raise ValueError("is a list without messages: each chat message needs a 'role' and a 'content'")
    asked = False
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(
                f"has a wrong message {number}: each chat message in {source.prompt_key!r} needs a 'role' and a "
                f"'content', not {_short(repr(message))}"
            )
        text = _content(message, number, pictures=source.image_key is not None)
        asked |= bool(text.strip()) and message["role"] not in _INSTRUCTIONS
    if messages[-1]["role"] == ASSISTANT:
        raise ValueError(
            "ends with a message of the assistant, which would stand before the policy's own answer: leave it out"
        )
    if not asked:
        raise ValueError("has no message that asks anything: a message of the user with text is needed")


def _content(message: dict[str, Any], number: int, *, pictures: bool) -> str:
    """The text of a message; ValueError where its content is something else."""
    content = message["content"]
    if isinstance(content, str):
        if not content.isascii():
            check_text(content)
        return content
    if content is None and message.get("tool_calls"):
        return ""
    if not isinstance(content, list):
        raise ValueError(
            f"has a wrong message {number}: its content is {'null' if content is None else type(content).__name__}: "
            "a string is needed"
        )
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if pictures and kind == "image":
            continue
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"has a wrong message {number}: its content holds {kind!r}; only text is supported, and "
                "{'type': 'image'} with imageKey"
            )
        texts.append(part["text"])
    return "".join(texts)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
