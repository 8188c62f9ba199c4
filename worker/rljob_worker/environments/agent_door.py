"""The door of a process's agents: OpenAI's `/v1/chat/completions` on the loopback address.

Each episode has an address and a token of its own: below `/NAME`, its token alone is answered.
"""

from __future__ import annotations

import hmac
import itertools
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple

from rljob_api.environments import AgentField
from rljob_worker.environments.base import MAX_OBSERVATION_BYTES, ROLES
from rljob_worker.errors import UserError
from rljob_worker.host.guarded_http import GuardedHandler, GuardedServer

Message = tuple[str, str]
"""Role and text."""
MODEL = "policy"
_COMPLETIONS, _MODELS = "/v1/chat/completions", "/v1/models"
_MAX_BODY = 2**23
_ROLE_BYTES = 16
_STRANGERS_BODY = 2**16
"""Longest body of a request without a token of the episode."""
_STACK_BYTES = 2**20
"""Stack of a call's thread, in which nothing of an agent runs."""
_POLL_SECONDS = 0.05
"""For the end of the process, which waits for it."""
_TAKEN = frozenset({"messages", "model", "stream", "stream_options", "user", "metadata", "store"})
_HARMLESS: Mapping[str, object] = {
    "n": 1, "logprobs": False, "parallel_tool_calls": True, "tools": [], "stop": [], "frequency_penalty": 0,
    "presence_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"},
}  # fmt: skip
"""Values that change nothing."""
_IGNORABLE = frozenset(one.value for one in AgentField)
_SAID_ELSEWHERE = {
    "temperature": "rollout.temperature",
    "top_p": "rollout.topP",
    "max_tokens": "episodes.maxTokensPerTurn",
    "max_completion_tokens": "episodes.maxTokensPerTurn",
    "stop": "rollout.stop",
}


class Call:
    """A call of an agent that waits for its answer.

    Attributes:
        messages: its conversation.

    Args:
        messages: its conversation.
        connection: where its client waits.
    """

    def __init__(self, messages: Sequence[Message], connection: socket.socket) -> None:
        self.messages, self._connection = tuple(messages), connection
        self._there = threading.Event()
        self._text: str | None = None
        self._cut = False

    def answer(self, text: str, *, cut: bool) -> None:
        """Give it what the policy said; `cut`: it was cut at its longest."""
        self._text, self._cut = text, cut
        self._there.set()

    def given_up(self) -> bool:
        """Whether its client has closed the connection, such as at a deadline of its own."""
        look = select.poll()
        look.register(self._connection, select.POLLIN)
        try:
            return bool(look.poll(0)) and self._connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def refuse(self) -> None:
        """Say that its episode has ended."""
        self._there.set()

    def wait(self) -> tuple[str, str] | None:
        """Text of the answer and why it ended; None where the episode has ended. The host's deadline bounds this."""
        self._there.wait()
        return None if self._text is None else (self._text, "length" if self._cut else "stop")


class Entrance(NamedTuple):
    """An episode's address and token."""

    name: str
    base_url: str
    token: str


class _Episode(NamedTuple):
    token: bytes
    called: Callable[[Call], None]


class AgentDoor:
    """Answers the calls of a process's agents, each by the token of its episode.

    Args:
        ignore: fields of requests that are left alone.

    Raises:
        UserError: there is no loopback address to listen on.
    """

    def __init__(self, ignore: Collection[str] = ()) -> None:
        try:
            self._server = _Server(frozenset(ignore))
        except OSError as error:
            raise UserError(f"environment.agent: its endpoint cannot listen on 127.0.0.1: {error}") from None
        threading.Thread(
            target=self._server.serve_forever, args=[_POLL_SECONDS], name="agent door", daemon=True
        ).start()

    def open(self, called: Callable[[Call], None]) -> Entrance:
        """An entrance of an episode's own; `called` gets its calls, in the threads of their connections."""
        name, token = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._server.episodes[name] = _Episode(token.encode(), called)
        return Entrance(name, f"http://127.0.0.1:{self._server.server_port}/{name}/v1", token)

    def shut(self, entrance: Entrance) -> None:
        """Answer nobody there any more; idempotent."""
        self._server.episodes.pop(entrance.name, None)

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()


def visible(messages: Sequence[Message]) -> str:
    """Messages as one text for people: what a user says as it is, what others say with the role before it."""
    return "\n".join(text if role == "user" else f"[{role}] {text}" for role, text in messages)


class _Server(GuardedServer):
    def __init__(self, ignore: frozenset[str]) -> None:
        # No token is the server's own: each is an episode's.
        super().__init__(("127.0.0.1", 0), _Handler, "")
        self.ignore = ignore
        self.episodes: dict[str, _Episode] = {}
        self.numbers = itertools.count(1)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a call's thread."""
        usual = threading.stack_size(_STACK_BYTES)
        try:
            super().process_request(request, client_address)
        finally:
            threading.stack_size(usual)


class _RefusedError(Exception):
    """A request that is not answered, and why."""


class _Handler(GuardedHandler):
    routes: ClassVar[Mapping[str, str]] = {_COMPLETIONS: "POST", _MODELS: "GET"}
    server: _Server
    _episode: _Episode | None = None

    def _respond(self, method: str) -> None:
        name, slash, rest = self.path.removeprefix("/").partition("/")
        self._episode = self.server.episodes.get(name)
        self.path = slash + rest
        super()._respond(method)

    def _body_skipped(self) -> bool:
        given = self.headers.get("Content-Length", "0")
        # A connection for each call: one that is kept could be closed while the next call is on its way.
        self.close_connection = True
        if "Transfer-Encoding" in self.headers or not (given.isascii() and given.isdigit()):
            self.refuse(HTTPStatus.BAD_REQUEST, "a body needs a Content-Length that is a whole number")
            return False
        if len(given) > 9 or int(given) > _MAX_BODY:
            self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body may have {_MAX_BODY} bytes")
            return False
        # Bodies are held: those of strangers would take the memory of all episodes.
        if int(given) > _STRANGERS_BODY and not any(map(self._right, self._tokens("", ""))):
            self.refuse(HTTPStatus.UNAUTHORIZED, "a bearer token is needed")
            return False
        self._body = self.rfile.read(int(given))
        return True

    def _right(self, token: str) -> bool:
        given = token.encode("utf-8", "surrogatepass")
        return self._episode is not None and hmac.compare_digest(given, self._episode.token)

    def serve(self, path: str, query: str) -> None:
        """Answer a call of the policy, or say which model there is."""
        del query
        if path == _MODELS:
            self.answer({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "rljob"}]})
            return
        try:
            request = _parsed(self._body)
            _check_fields(request, self.server.ignore)
            call = Call(_messages(request.get("messages")), self.connection)
        except _RefusedError as error:
            self.refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        assert self._episode is not None
        self._episode.called(call)
        given = call.wait()
        if given is None:
            self.refuse(HTTPStatus.GONE, "the episode has ended: it is not answered any more")
            return
        self._complete(*given, streamed=bool(request.get("stream")), model=str(request.get("model") or MODEL))

    def _complete(self, text: str, finish: str, *, streamed: bool, model: str) -> None:
        head = {"id": f"chatcmpl-{next(self.server.numbers)}", "created": int(time.time()), "model": model}
        if not streamed:
            message = {"role": "assistant", "content": text, "refusal": None}
            choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
            self.answer({**head, "object": "chat.completion", "choices": [choice]})
            return
        deltas: list[tuple[dict[str, str], str | None]] = [({"role": "assistant", "content": text}, None), ({}, finish)]
        lines = []
        for delta, ended in deltas:
            choice = {"index": 0, "delta": delta, "finish_reason": ended, "logprobs": None}
            lines.append(json.dumps({**head, "object": "chat.completion.chunk", "choices": [choice]}))
        body = "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]"))
        self.send(body.encode(), "text/event-stream", HTTPStatus.OK)

    def refuse(self, status: HTTPStatus, message: str) -> None:
        """An error, in the form in which OpenAI's client reads it."""
        self.close_connection = True
        kind = "authentication_error" if status is HTTPStatus.UNAUTHORIZED else "invalid_request_error"
        self.answer({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _RefusedError(f"the body is no JSON: {error}") from None
    if not isinstance(request, dict):
        raise _RefusedError("the body is no JSON object")
    return request


def _check_fields(request: Mapping[str, Any], ignore: Collection[str]) -> None:
    for name, value in request.items():
        if name in _TAKEN or name in ignore or value is None or (name in _HARMLESS and value == _HARMLESS[name]):
            continue
        said = f", which spec.{_SAID_ELSEWHERE[name]} says for the job" if name in _SAID_ELSEWHERE else ""
        way = f"leave it out, or name it in environment.agent.ignore{said}" if name in _IGNORABLE else "leave it out"
        raise _RefusedError(f"{name}: this endpoint does not take it: {way}")
    for name, kind, said in (("stream", bool, "true or false"), ("model", str, "a text")):
        if request.get(name) is not None and not isinstance(request[name], kind):
            raise _RefusedError(f"{name}: {request[name]!r:.40}; {said} is needed")


def _messages(given: object) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise _RefusedError("messages: a list of one or more is needed")
    found = [_message(one, f"messages[{place}]") for place, one in enumerate(given)]
    if found[-1][0] == "assistant":
        raise _RefusedError("messages: the last one is the assistant's: an answer is not continued")
    # With what is shown of their roles, they are an observation.
    if (size := sum(len(text.encode()) + _ROLE_BYTES for _, text in found)) > MAX_OBSERVATION_BYTES:
        raise _RefusedError(f"messages: {size} bytes; {MAX_OBSERVATION_BYTES} at most, {_ROLE_BYTES} for each role")
    return found


def _message(given: object, where: str) -> Message:
    if not isinstance(given, dict):
        raise _RefusedError(f"{where}: no object")
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise _RefusedError(f"{where}.role: {role!r:.40}; allowed: {', '.join(ROLES)}")
    for name, value in given.items():
        if name not in ("role", "content") and value not in (None, [], ""):
            raise _RefusedError(f"{where}.{name}: this endpoint takes role and content, as text")
    if isinstance(content, list):
        parts = [one.get("text") if isinstance(one, dict) and one.get("type") == "text" else None for one in content]
        texts = [one for one in parts if isinstance(one, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str):
        raise _RefusedError(f"{where}.content: text, or parts of the type text, are needed")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise _RefusedError(f"{where}.content: no text: {error.reason}") from None
    return str(role), content
