"""Asking a job's own servers (Ray's head, the driver): small answers, each within a deadline."""

from __future__ import annotations

import asyncio
import json

import aiohttp

from rljob_api.base import INT32_MAX
from rljob_api.json_types import Json, JsonObject

ANSWER_BYTES = 2**16
"""Most bytes of an answer about which nothing else is said. What a job's image answers is read into the memory of the
operator, which all jobs share, and JSON may take more than twenty times its size there."""
_SHOWN = 300


class NoAnswer(Exception):
    """A job's server did not answer, or not as it should; the message says which and why, for people.

    Attributes:
        code: HTTP status; 0: no answer at all.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class AnswerTooLarge(NoAnswer):
    """The answer has more bytes than were asked for."""


class Endpoint:
    """One server of a job.

    Args:
        session: carries the requests; its connections are shared by all jobs.
        name: what people call the server, for messages.
        address: `http://host:port`.
        token: bearer token.
        seconds: deadline of one request, its answer included.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        name: str,
        address: str,
        token: str | None,
        seconds: float,
    ) -> None:
        self._session = session
        self._name = name
        self._address = address.rstrip("/")
        # Compressed answers are neither asked for nor unpacked: a few bytes can become any number of them.
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._seconds = seconds

    async def json(self, method: str, path: str, body: JsonObject | None = None, largest: int = ANSWER_BYTES) -> Json:
        """Send a request and return the answer's JSON.

        Raises:
            NoAnswer: no answer in time, more than `largest` bytes, an error, or no JSON.
        """
        content = await self.content(method, path, body, largest)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise NoAnswer(f"{self._name} answered what is no JSON to {path}: {error}") from None

    async def content(
        self, method: str, path: str, body: JsonObject | None = None, largest: int = ANSWER_BYTES
    ) -> bytes:
        """Send a request and return the answer.

        Raises:
            NoAnswer: no answer in time, more than `largest` bytes, or an error.
        """
        try:
            async with (
                asyncio.timeout(self._seconds),
                self._session.request(
                    method,
                    self._address + path,
                    json=body,
                    headers=self._headers,
                    allow_redirects=False,
                    auto_decompress=False,
                ) as response,
            ):
                content = await self._read(response, largest)
                if response.status >= 300:
                    text = content.decode(errors="replace").strip()
                    shown = text if len(text) <= _SHOWN else "... " + text[-_SHOWN:]
                    raise NoAnswer(f"{self._name} answered {response.status} to {path}: {shown}", response.status)
                return content
        except TimeoutError:
            raise NoAnswer(f"{self._name} did not answer within {self._seconds:g} s at {self._address}") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise NoAnswer(f"{self._name} cannot be reached at {self._address}: {error}") from None

    async def _read(self, response: aiohttp.ClientResponse, largest: int) -> bytes:
        parts, size = [], 0
        async for part in response.content.iter_chunked(2**16):
            size += len(part)
            if size > largest:
                response.close()
                raise AnswerTooLarge(f"{self._name} answered more than {largest} bytes to {response.url.path}")
            parts.append(part)
        return b"".join(parts)


def whole(value: object, name: str, least: int = 0, most: int = INT32_MAX) -> int:
    """A whole number of an answer, by default one that the status can hold.

    Raises:
        ValueError: it is none; names the field. Python's JSON reader also lets NaN and infinities through.
    """
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise ValueError(f"{name} is no whole number from {least} to {most}")
