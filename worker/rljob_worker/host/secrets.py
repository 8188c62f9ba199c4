"""Variables that are secrets of the program that needs them, recognised by their names and values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_WORDS = frozenset(
    {
        "APIKEY", "COOKIE", "CREDENTIAL", "CREDENTIALS", "KEY", "KEYS", "PASS", "PASSPHRASE", "PASSWD", "PASSWORD",
        "PASSWORDS", "PAT", "SECRET", "SECRETS", "TOKEN", "TOKENS", "WEBHOOK",
    }
)  # fmt: skip
_IN_ADDRESS = re.compile(r"://[^/@\s]+:[^/@\s]+@")
"""A password in a URL."""


def secrets_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that hold a secret, such as HF_TOKEN, AWS_SECRET_ACCESS_KEY or a URL with a password."""
    return {
        name: value
        for name, value in variables.items()
        if not _WORDS.isdisjoint(name.upper().split("_")) or _IN_ADDRESS.search(value)
    }


@contextmanager
def withheld(*needed: str) -> Iterator[dict[str, str]]:
    """Inside, processes that are started see none of them but the needed ones; what they are is given."""
    found = {name: value for name, value in secrets_of(os.environ).items() if name not in needed}
    for name in found:
        del os.environ[name]
    try:
        yield found
    finally:
        os.environ.update(found)
