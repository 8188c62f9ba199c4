"""Asking a job's own servers (Ray's head, the driver): small answers, each within a deadline."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

_SHOWN = 300


class NoAnswer(Exception):
    """A job's server did not answer, or not as it should; the message says which and why, for people.

    Attributes:
        code: HTTP status; 0: no answer at all.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class Endpoint:
    """One server of a job.

    Args:
        session: carries the requests; its connections are shared by all jobs.
        name: what people call the server, for messages.
        address: `http://host:port`.
        token: bearer token.
        seconds: deadline of one request, its answer included.
        largest: most bytes that an answer may have.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        name: str,
        address: str,
        token: str | None,
        seconds: float,
        largest: int = 2**25,
    ) -> None:
        self._session = session
        self._name = name
        self._address = address.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._seconds = seconds
        self._largest = largest

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the answer's JSON.

        Raises:
            NoAnswer: no answer in time, an error, or no JSON.
        """
        content = await self.content(method, path, body)
        try:
            return json.loads(content)
        except ValueError as error:
            raise NoAnswer(f"{self._name} answered what is no JSON to {path}: {error}") from None

    async def content(self, method: str, path: str, body: Any = None) -> bytes:
        """Send a request and return the answer."""
        try:
            async with (
                asyncio.timeout(self._seconds),
                self._session.request(
                    method, self._address + path, json=body, headers=self._headers, allow_redirects=False
                ) as response,
            ):
                content = await self._read(response)
                if response.status >= 300:
                    text = content.decode(errors="replace").strip()
                    shown = text if len(text) <= _SHOWN else "... " + text[-_SHOWN:]
                    raise NoAnswer(f"{self._name} answered {response.status} to {path}: {shown}", response.status)
                return content
        except TimeoutError:
            raise NoAnswer(f"{self._name} did not answer within {self._seconds:g} s at {self._address}") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise NoAnswer(f"{self._name} cannot be reached at {self._address}: {error}") from None

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        parts, size = [], 0
        async for part in response.content.iter_chunked(2**16):
            size += len(part)
            if size > self._largest:
                response.close()
                raise NoAnswer(f"{self._name} answered more than {self._largest} bytes")
            parts.append(part)
        return b"".join(parts)
