"""JSON objects with a checksum of their own text as last field, so that a changed digit is no other value."""

from __future__ import annotations

import json
import zlib
from typing import Any

FIELD = "crc32"
"""Its name. Texts without it are of versions that wrote none, or of people, and are taken as they are."""
_MARK = f'"{FIELD}": "'
_DIGITS = 8


def sealed(value: dict[str, Any], *, indent: int | None = None, **options: Any) -> str:
    """The text of an object, ended by its checksum.

    Args:
        value: not empty, without a field of this name.
        indent: as of `json.dumps`.
        options: further ones of `json.dumps`.
    """
    body = json.dumps(value, indent=indent, **options)[:-1].rstrip()
    gap, end = (" ", "}") if indent is None else ("\n" + " " * indent, "\n}")
    return f'{body},{gap}{_MARK}{_digest(body)}"{end}'


def unsealed(text: str) -> Any:
    """The value of a text, without the checksum.

    Raises:
        ValueError: it is no JSON, or not what was written.
        RecursionError: it is nested too deeply.
    """
    value = json.loads(text)
    if not isinstance(value, dict) or not value:
        return value
    last, checksum = list(value.items())[-1]
    if last != FIELD and not (isinstance(checksum, str) and len(checksum) == _DIGITS):
        return value
    own = _digest(text[: text.rfind(f'"{last}": "')].rstrip().removesuffix(","))
    if last == FIELD and checksum == own:
        return {name: part for name, part in value.items() if name != FIELD}
    # A name that was changed is no reason to believe the rest.
    if FIELD in value or checksum == own:
        raise ValueError(
            f"its content is not what was written ({FIELD}); what was changed on purpose has no such field"
        )
    return value


def _digest(body: str) -> str:
    return f"{zlib.crc32(body.encode('utf-8', 'surrogateescape')):08x}"
