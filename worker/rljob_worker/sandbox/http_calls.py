"""Requests to servers of others, which may be overloaded, or away for a while."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import ClientSession

TRANSIENT = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which the same request may succeed."""


def retry_after(value: str) -> float:
    """Seconds after which a server wants to be asked again, by its header `Retry-After`; 0 where that has no number."""
    return float(value) if re.fullmatch(r"\d{1,4}", value) else 0.0


def open_session(concurrency: int, headers: Mapping[str, str] = MappingProxyType({})) -> ClientSession:
    """Connections to at most so many requests at once, by the environment's proxies; they keep no cookies, and have no
    deadline of their own."""
    from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

    return ClientSession(
        connector=TCPConnector(limit=concurrency), headers=headers, cookie_jar=DummyCookieJar(),
        timeout=ClientTimeout(total=None), trust_env=True,
    )  # fmt: skip
