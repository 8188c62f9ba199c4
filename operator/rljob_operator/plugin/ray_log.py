"""Ray's log API, asked through a job's head."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from rljob_api.wire.names import DASHBOARD_PORT
from rljob_operator.plugin.head import Head
from rljob_operator.ray.http import NoAnswer

_ANSWER_SECONDS = 30.0


@asynccontextmanager
async def open_log(head: Head, file: str, lines: int, *, follow: bool = False) -> AsyncIterator[aiohttp.StreamReader]:
    """The content of a log file on the head; Ray reads it from its end (`dashboard/modules/state`).

    Args:
        head: the job's.
        file: `SubmissionView.log_file`.
        lines: so many last ones; -1: all.
        follow: go on with what is written later, which never ends by itself.

    Raises:
        NoAnswer: Ray does not answer, or not with the log; also while it is read.
    """
    session, address = await head.address(DASHBOARD_PORT)
    token = await head.ray_token()
    path = f"/api/v0/logs/{'stream' if follow else 'file'}?{file}&lines={lines}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    patience = aiohttp.ClientTimeout(
        total=None, sock_connect=_ANSWER_SECONDS, sock_read=None if follow else _ANSWER_SECONDS
    )
    try:
        async with session.get(address + path, headers=headers, timeout=patience) as response:
            if response.status >= 300:
                raise NoAnswer(f"Ray's log API answered {response.status}: {(await response.text())[-300:].strip()}")
            yield response.content
    except (aiohttp.ClientError, TimeoutError) as error:
        raise NoAnswer(f"Ray's log API: {error or type(error).__name__}") from None
