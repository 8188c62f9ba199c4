"""Labels: the text that a reward compares with, from whatever type a data set has them in."""

from __future__ import annotations

import datetime
import json
import math
import uuid
from decimal import Decimal


def label_text(value: object) -> str:
    """A label as the rewards see it.

    Strings are taken as they are, bytes as UTF-8, decimals with all their digits, dates and times by ISO 8601,
    everything else as JSON.

    Raises:
        ValueError: it is null, not finite, bytes that are no text, or of a type that has no text; says which.
    """
    if type(value) is str:
        if not value.isascii():
            check_text(value)
        return value
    return _text(value) if isinstance(value, str | bytes | datetime.date | datetime.time | uuid.UUID) else _json(value)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"is bytes that are not UTF-8: {error.reason} at byte {error.start}") from None
    if isinstance(value, datetime.date | datetime.time):
        if value != value:
            raise ValueError("is a time stamp that is none (NaT)")
        return value.isoformat()
    text = str(value)
    check_text(text)
    return text


def _json(value: object, *, nested: bool = False) -> str:
    if value is None and not nested:
        raise ValueError("is null")
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"is {value}, which is no number")
        return format(value, "f")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("is NaN, which is no number" if math.isnan(value) else "is not finite")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_json(item, nested=True) for item in value) + "]"
    if isinstance(value, dict):
        parts = (f"{json.dumps(_key(k), ensure_ascii=False)}: {_json(v, nested=True)}" for k, v in value.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, str | bytes | datetime.date | datetime.time | uuid.UUID):
        return json.dumps(_text(value), ensure_ascii=False)
    if isinstance(value, bool | int | float) or value is None:
        return json.dumps(value)
    raise ValueError(f"is of type {type(value).__name__}, which has no text; a string or number is needed")


def _key(key: object) -> str:
    return _text(key) if isinstance(key, str | bytes | datetime.date) else _json(key)


def check_text(text: str) -> None:
    """ValueError for half of a surrogate pair, which JSON can escape and UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds half a character (\\u{ord(text[error.start]):04x}), which is no text") from None
