"""Requests to servers of others, which may be overloaded, or away for a while."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import ClientSession

TRANSIENT = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which the same request may succeed."""


def retry_after(value: str) -> float:
    """Seconds after which a server wants to be asked again, by its header `Retry-After`: a number of them, of which
    some servers write parts, or a date; 0 where it is neither."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value.strip()):
        return float(value)
    try:
        at = parsedate_to_datetime(value)
        # A date without a zone is one of GMT.
        return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def open_session(concurrency: int, headers: Mapping[str, str] = MappingProxyType({})) -> ClientSession:
    """Connections to at most so many requests at once, by the environment's proxies; they keep no cookies, and have no
    deadline of their own."""
    from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

    return ClientSession(
        connector=TCPConnector(limit=concurrency), headers=headers, cookie_jar=DummyCookieJar(),
        timeout=ClientTimeout(total=None), trust_env=True,
    )  # fmt: skip
