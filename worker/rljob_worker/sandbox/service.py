"""Servers that run programs elsewhere: SandboxFusion's `POST /run_code`, as its public documentation has it.

A request has `code`, `language`, `stdin` and `run_timeout`. Its answer has `status` (`Success`, `Failed`,
`SandboxError`) and `run_result` with `status` (`Finished`, `TimeLimitExceeded`, `Error`), `return_code`, `stdout` and
`execution_time`. Nothing that a program prints changes what is read of these but `stdout`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rljob_api import safe_text
from rljob_api.how_many import how_many
from rljob_worker.sandbox.http_calls import TRANSIENT, open_session, retry_after
from rljob_worker.sandbox.limits import SandboxError, ServiceSetup

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 10.0
_QUOTED = 300
_ESCAPED = 6
"""Bytes of JSON that one byte of output takes at most."""
_BESIDE_OUTPUT = 2**20
"""Bytes of an answer beside the program's output."""
_RESULT = re.compile(rb'"run_result"\s*:\s*\{')
"""Part of an answer that is one: in what a program prints, quotation marks are escaped."""
_TRIES_IN_THE_WAIT = 4
"""Requests that fit the time of a response's waits, each being silent to its end."""
_KNOWN, _PRINTS, _KNOWN_SECONDS, _KNOWN_TRIES = "print(6 * 7)", "42", 5.0, 8
"""A program that every server can run, what it prints, its seconds, and how many of its waits fit that time."""
_FAILURES, _FEWEST_FAILURES = 5, 2
"""Failures of a program, each at a server that had just run the known one, from which on the fault is the program's;
and as many when the time is spent."""


@dataclass(frozen=True, slots=True)
class Ran:
    """End of a program."""

    in_time: bool
    exit_code: int
    printed: str
    seconds: float
    """Seconds that it ran, as the server says."""
    over_output: bool = False
    """Whether it printed more than is read."""
    lost: bool = False
    """Whether servers that run another program give no result of this one, again and again."""


_LOST = Ran(True, 1, "", 0.0, lost=True)


@dataclass(slots=True)
class Clock:
    """Time of the programs of one response."""

    program_left: float
    """Seconds that they may go on to run."""
    wait_left: float
    """Seconds that they may go on to wait."""

    def count(self, ran: float, waited: float) -> None:
        """Some of it has passed."""
        self.program_left -= ran
        self.wait_left -= waited


class _Transient(Exception):
    """An answer that another request may not get.

    Args:
        after: seconds after which the server wants to be asked again.
        overloaded: whether it says that it has too much to do.
    """

    def __init__(self, text: str, after: float = 0.0, *, overloaded: bool = False) -> None:
        super().__init__(text)
        self.after, self.overloaded = after, overloaded


class _NoTimeError(Exception):
    """The time of a response's waits has passed before a program could be sent."""


class Service:
    """The servers, asked by turns; for one event loop, until `close()`."""

    def __init__(self, setup: ServiceSetup) -> None:
        self._setup = setup
        self._next = itertools.cycle(setup.urls)
        self._session: ClientSession | None = None
        self._alone = asyncio.Lock()

    async def run(self, source: str, given: str, seconds: float, output_bytes: int, clock: Clock) -> Ran:
        """Run a Python program, which gets `given` on its standard input.

        A server that is away, overloaded or silent, or answers what is no answer, is followed by another, at growing
        intervals. A program that has failed is sent again only to a server that runs the known one before: what fails
        there again and again is ended by the program, and `lost`.

        Args:
            source: the program.
            given: its standard input.
            seconds: after which it is ended.
            output_bytes: that it may print.
            clock: of its response; what passes is counted there.

        Raises:
            SandboxError: `clock.wait_left` was spent, or a server refuses the request.
        """
        body = _body(source, given, seconds)
        begun, pause, sent, last = time.monotonic(), _FIRST_PAUSE, 0, "none was sent"
        faults, blamed = 0, False
        while clock.wait_left > 0:
            asked, after, url = time.monotonic(), 0.0, next(self._next)
            end = asked + clock.wait_left
            try:
                # Programs that fail twice run one at a time: none of them is blamed for what another ends.
                async with self._turn(faults > 0, end):
                    known, patience = self._patience(end, _KNOWN_TRIES), self._patience(end, _TRIES_IN_THE_WAIT)
                    blamed = False
                    if sent:
                        await self._try_known(url, known)
                        patience = self._patience(end, _TRIES_IN_THE_WAIT)
                    began, sent = time.monotonic(), sent + 1
                    try:
                        ran = await self._tried(url, body, output_bytes, seconds + patience)
                    except _Transient as error:
                        # It had as long as the known one.
                        fair = patience >= self._setup.wait_seconds / _KNOWN_TRIES
                        blamed = sent > 1 and fair and not error.overloaded
                        faults += blamed
                        raise
                now = time.monotonic()
                spent = min(ran.seconds, now - began)
                clock.count(spent, now - asked - spent)
                return ran
            except _Transient as error:
                last, after = f"{url}: {error}", error.after
            except _NoTimeError:
                pass
            if faults == _FAILURES:
                clock.count(0.0, time.monotonic() - asked)
                return _LOST
            await asyncio.sleep(max(0.0, min(max(after, pause * random.uniform(0.5, 1.0)), clock.wait_left)))
            clock.count(0.0, time.monotonic() - asked)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if blamed and faults >= _FEWEST_FAILURES:
            return _LOST
        raise SandboxError(
            f"sandbox.service: no answer to {how_many(sent, 'request')} in {time.monotonic() - begun:.3g} s "
            f"(sandbox.service.waitSeconds: {self._setup.wait_seconds:g}); the last: {last}"
        )

    async def close(self) -> None:
        """Close its connections; they are opened again when it is asked."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def _turn(self, alone: bool, end: float) -> AsyncIterator[None]:
        """Wait for it, where that is to be alone; _NoTimeError where it does not come until `end`."""
        if not alone:
            yield
            return
        try:
            async with asyncio.timeout(self._patience(end, 1)):
                await self._alone.acquire()
        except TimeoutError:
            raise _NoTimeError from None
        try:
            yield
        finally:
            self._alone.release()

    def _patience(self, end: float, tries: int) -> float:
        """Seconds to wait until `end` at most, of which so many fit a response's waits; _NoTimeError after it."""
        if (left := end - time.monotonic()) <= 0:
            raise _NoTimeError
        return min(left, self._setup.wait_seconds / tries)

    async def _try_known(self, url: str, patience: float) -> None:
        """Run a program that does nothing; _Transient where a server does not, before long."""
        ran = await self._tried(url, _body(_KNOWN, "", _KNOWN_SECONDS), len(_PRINTS) + 1, patience)
        if not ran.in_time or ran.exit_code != 0 or ran.printed.strip() != _PRINTS:
            raise _Transient(f"it does not run {_KNOWN}: {_shown(str(ran))}")

    async def _tried(self, url: str, body: Mapping[str, object], output_bytes: int, patience: float) -> Ran:
        """The end of a program on one server; _Transient where that gives none within so many seconds."""
        from aiohttp import ClientError

        try:
            async with asyncio.timeout(patience):
                return await self._request(url, body, output_bytes)
        except TimeoutError:
            raise _Transient(f"no answer within {patience:.3g} s") from None
        except (ClientError, OSError) as error:
            raise _Transient(_shown(f"{type(error).__name__}: {error}")) from None
        except ValueError as error:
            # A proxy of the environment that is none, for example.
            raise SandboxError(f"sandbox.service: {url} cannot be asked: {_shown(str(error))}") from None

    async def _request(self, url: str, body: Mapping[str, object], output_bytes: int) -> Ran:
        most = _ESCAPED * output_bytes + _BESIDE_OUTPUT
        address = f"{url.rstrip('/')}/run_code"
        async with self._opened().post(address, json=body, allow_redirects=False) as response:
            content = await _bounded(response, most)
            status, after = response.status, response.headers.get("Retry-After", "")
        said = _shown(content[: 4 * _QUOTED].decode(errors="replace"))
        if status == 200 and len(content) > most:
            if not _RESULT.search(content):
                raise _Transient(f"more than {most} bytes without the result of a run: {said}")
            return Ran(True, 0, "", 0.0, over_output=True)
        if status == 200:
            return _ran(content, said)
        if status in TRANSIENT or status >= 500:
            overloaded = status in TRANSIENT or bool(after)
            raise _Transient(f"HTTP {status}: {said}", retry_after(after), overloaded=overloaded)
        raise SandboxError(f"sandbox.service: {address} gave HTTP {status}: {said}")

    def _opened(self) -> ClientSession:
        if self._session is None:
            self._session = open_session(self._setup.concurrency)
        return self._session


def _body(source: str, given: str, seconds: float) -> dict[str, object]:
    return {"code": source, "language": "python", "stdin": given, "run_timeout": seconds}


def _ran(content: bytes, said: str) -> Ran:
    """The end of a program in an answer; _Transient where the answer is none."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        raise _Transient(f"an answer that is no JSON: {said}") from None
    status = answer.get("status") if isinstance(answer, dict) else None
    result = answer.get("run_result") if isinstance(answer, dict) else None
    if status not in ("Success", "Failed") or not isinstance(result, dict):
        raise _Transient(f"an answer without the result of a run: {said}")
    took, printed, code = result.get("execution_time"), result.get("stdout"), result.get("return_code")
    seconds = float(took) if isinstance(took, int | float) and 0 <= took < 1e9 else 0.0
    if result.get("status") == "TimeLimitExceeded":
        return Ran(False, 1, printed if isinstance(printed, str) else "", seconds)
    if result.get("status") != "Finished" or not isinstance(printed, str) or type(code) is not int:
        raise _Transient(f"an answer without the result of a run: {said}")
    return Ran(True, code, printed, seconds)


async def _bounded(response: ClientResponse, most: int) -> bytes:
    """The body, or what is more than `most` bytes of it."""
    content = bytearray()
    async for chunk in response.content.iter_chunked(65536):
        content += chunk
        if len(content) > most:
            break
    return bytes(content)


def _shown(text: str) -> str:
    return safe_text.visible_line(text if len(text) <= _QUOTED else f"{text[:_QUOTED]} ...")
