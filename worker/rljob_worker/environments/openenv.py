"""Environments of an OpenEnv server, over its WebSocket `/ws`: a session for each episode.

Messages are JSON objects. Asked is `{"type": "reset", "data": {"seed": N}}`, `{"type": "step", "data": ACTION}` and
`{"type": "close"}`; answered `{"type": "observation", "data": {"observation", "reward", "done"}}` or
`{"type": "error", "data": {"code", "message"}}`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from rljob_api import safe_text
from rljob_api.spec import OpenEnvSpec
from rljob_worker.environments.base import MAX_OBSERVATION_BYTES, GoneError

if TYPE_CHECKING:
    from aiohttp import ClientSession, ClientWebSocketResponse
    from anyio.from_thread import BlockingPortal

_PAUSE_SECONDS = 0.5
_CLOSE_SECONDS = 1.0
"""For the end of a session, which the answers to others wait for."""
_FULL = "CAPACITY_REACHED"
_INFRA = frozenset({_FULL, "FACTORY_ERROR", "SESSION_ERROR"})
"""Errors of the server, and not of what was asked."""
_INVALID = "VALIDATION_ERROR"
"""An action that is not one of the server's actions."""
_SHOWN = 300
Answer = Mapping[str, object]


class OpenEnvServer:
    """Makes environments whose sessions share an event loop, which answers pings while a policy generates.

    Args:
        settings: of the server.
    """

    def __init__(self, settings: OpenEnvSpec) -> None:
        # Imports that other hosts do without.
        from anyio.from_thread import start_blocking_portal

        self.settings = settings
        scheme, _, rest = settings.url.rstrip("/").partition("://")
        self.url = f"{ {'http': 'ws', 'https': 'wss'}.get(scheme, scheme) }://{rest.removesuffix('/ws')}/ws"
        self._running = start_blocking_portal()
        self.portal: BlockingPortal = self._running.__enter__()
        self._session: ClientSession | None = None

    def __call__(self) -> OpenEnv:
        """An episode's environment."""
        return OpenEnv(self)

    async def connected(self) -> ClientWebSocketResponse:
        """Open a session's connection; raises what aiohttp raises."""
        from aiohttp import ClientSession, DummyCookieJar, TraceConfig

        if self._session is None:
            # Nothing but the address of the manifest is spoken to: no proxy of a variable, no other server.
            trace = TraceConfig()
            trace.on_request_redirect.append(_refuse_redirect)
            self._session = ClientSession(cookie_jar=DummyCookieJar(), trace_configs=[trace])
        return await self._session.ws_connect(self.url, max_msg_size=4 * MAX_OBSERVATION_BYTES, heartbeat=None)

    def close(self) -> None:
        """Close the client; its sessions were closed with their environments."""
        if self._session is not None:
            with suppress(Exception):
                self.portal.call(self._session.close)
        self._running.__exit__(None, None, None)


class OpenEnv:
    """One session.

    Args:
        server: of it.
    """

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._line: _Line | None = None

    def reset(self, *, seed: int, options: Mapping[str, object]) -> tuple[str, dict[str, float]]:
        """Open a session, and begin.

        A server that is not there or has no session left is asked again, for `waitSeconds`.

        Raises:
            GoneError: that is so all the time, or the session ends.
            RuntimeError: it answers with an error.
            ValueError: what it answers is no observation, or the last one.
        """
        del options
        until = time.monotonic() + self._server.settings.wait_seconds
        while True:
            try:
                self._line = self._server.portal.call(_Line.opened, self._server)
                data = self._checked(self._ask({"type": "reset", "data": {"seed": seed}}))
                break
            except _AgainError as error:
                self.close()
                if time.monotonic() > until:
                    waited = self._server.settings.wait_seconds
                    raise GoneError(f"{error} (asked for environment.openenv.waitSeconds, {waited:g} s)") from None
                time.sleep(_PAUSE_SECONDS)
        if data.get("done"):
            raise ValueError(f"the server began with an episode that is done: {_short(data)}")
        return self._shown(data), {}

    def step(self, action: str) -> tuple[str, object, object, bool, dict[str, float]]:
        """Send an action; errors as of `reset`."""
        answer = self._ask({"type": "step", "data": {self._server.settings.action: action}})
        if answer.get("type") == "error" and _of(answer).get("code") == _INVALID:
            return self._refused(answer), 0.0, False, False, {"valid": 0.0}
        data = self._checked(answer)
        reward = data.get("reward")
        # It has no reward where it says none.
        return self._shown(data), 0.0 if reward is None else reward, data.get("done", False), False, {}

    def close(self) -> None:
        """End the session; idempotent."""
        line, self._line = self._line, None
        if line is not None:
            self._server.portal.call(line.close)

    def _ask(self, message: Mapping[str, object]) -> Answer:
        assert self._line is not None
        return self._server.portal.call(self._line.ask, message)

    def _checked(self, answer: Answer) -> Answer:
        """The data of an observation; RuntimeError where it is an error, GoneError where that is the server's own."""
        data = _of(answer)
        if answer.get("type") == "error":
            code = data.get("code")
            said = f"the server answered {code}: {data.get('message')}"[:_SHOWN]
            if code == _FULL:
                raise _AgainError(f"{self._server.url}: {said}")
            if str(code) in _INFRA:
                raise GoneError(f"{self._server.url}: {said}")
            raise RuntimeError(said)
        if answer.get("type") != "observation" or "observation" not in data:
            raise ValueError(f"the server answered with {_short(answer)}, which is no observation of OpenEnv")
        return data

    def _refused(self, answer: Answer) -> str:
        """Observation after an action that is none; ValueError where that is not the policy's doing."""
        told, field = [], self._server.settings.action
        errors = _of(answer).get("errors")
        for error in errors if isinstance(errors, list) else []:
            at, said = (error.get("loc"), error.get("msg")) if isinstance(error, dict) else (None, None)
            if not isinstance(at, list) or not at or at[0] != field or error.get("type") == "extra_forbidden":
                raise ValueError(
                    f"the actions of the server are not objects with {field!r} alone (environment.openenv.action): "
                    f"{_short(error)}"
                )
            told.append(str(said))
        return safe_text.visible_line(f"No valid action: {'; '.join(told) or _of(answer).get('message')}"[:_SHOWN])

    def _shown(self, data: Answer) -> str:
        """The field of the observation that is shown, or all of it as JSON."""
        observation, field = data.get("observation"), self._server.settings.observation
        if field is None:
            return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
        if not isinstance(observation, dict) or field not in observation:
            raise ValueError(
                f"the observation has no field {field!r} (environment.openenv.observation): {_short(data)}"
            )
        shown = observation[field]
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


class _AgainError(GoneError):
    """The server is away or full, and may be back a moment later."""


class _Line:
    """A connection that is read all the time, since reading answers pings."""

    def __init__(self, socket: ClientWebSocketResponse, url: str) -> None:
        self._socket, self._url = socket, url
        self._answers: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def opened(cls, server: OpenEnvServer) -> _Line:
        """Connect; GoneError where no server answers, or one that is none of OpenEnv."""
        from aiohttp import ClientConnectionError, WSServerHandshakeError

        try:
            return cls(await server.connected(), server.url)
        except GoneError:
            raise
        except WSServerHandshakeError as error:
            kind = _AgainError if error.status >= 500 else GoneError
            raise kind(f"{server.url}: no WebSocket of OpenEnv: HTTP {error.status} ({error.message})") from None
        except (ClientConnectionError, OSError) as error:
            raise _AgainError(f"{server.url}: {_named(error)}") from None
        except Exception as error:
            raise GoneError(f"{server.url}: {_named(error)}") from None

    async def ask(self, message: Mapping[str, object]) -> Answer:
        """The answer to a message; GoneError where the connection ends before, ValueError where it is none, or where
        what came before it was asked for by nothing: answers would be those to other actions."""
        unasked = not self._answers.empty()
        try:
            await self._socket.send_json(message)
        except Exception as error:
            # A server that is full says so unasked, and closes.
            if self._answers.empty():
                raise GoneError(f"{self._url}: {_named(error)}") from None
        found = await self._answers.get()
        if found is None:
            raise GoneError(f"{self._url}: the server ended the session")
        if isinstance(found, Exception):
            raise ValueError(f"the server sent what is no message of OpenEnv: {_named(found)}")
        try:
            answer = json.loads(found)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ValueError(f"the server answered with {_short(found)}, which is no JSON object")
        if unasked and answer.get("type") != "error":
            raise ValueError(f"the server sent a message that it was not asked for: {_short(found)}")
        return answer

    async def close(self) -> None:
        """End the session, as the protocol has it."""
        with suppress(Exception):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._socket.send_json({"type": "close"})
                await self._socket.close()
        self._reading.cancel()

    async def _read(self) -> None:
        from aiohttp import WSMsgType

        with suppress(Exception):
            async for message in self._socket:
                if message.type in (WSMsgType.TEXT, WSMsgType.ERROR):
                    self._answers.put_nowait(message.data)
                elif message.type is WSMsgType.BINARY:
                    self._answers.put_nowait(TypeError("bytes in the place of a text"))
        self._answers.put_nowait(None)


async def _refuse_redirect(session: object, context: object, params: object) -> NoReturn:
    del session, context
    response = getattr(params, "response", None)
    to = "" if response is None else f" to {response.headers.get('Location', '')}"
    raise GoneError(f"environment.openenv.url: the server redirects{to}, and only the address that is given is asked")


def _of(answer: Answer) -> Answer:
    data = answer.get("data")
    return data if isinstance(data, dict) else {}


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_SHOWN]


def _short(value: object) -> str:
    return repr(value)[:_SHOWN]
