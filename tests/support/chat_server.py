"""A server with OpenAI's interface for chat completions, written from its reference, whose answers a test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from support.loopback import on_loopback

Answer = Callable[[dict[str, Any], int], str | web.Response | float]
"""From a request's body and its number to the text of the completion, a whole response, or seconds to hang."""


@dataclass
class ChatServer:
    answer: Answer
    models: tuple[str, ...] = ("grader",)
    key: str | None = None
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def _models(self, request: web.Request) -> web.Response:
        if (refused := self._refused(request)) is not None:
            return refused
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    async def _chat(self, request: web.Request) -> web.Response:
        if (refused := self._refused(request)) is not None:
            return refused
        body = await request.json()
        self.asked.append(body)
        given = self.answer(body, len(self.asked))
        if isinstance(given, float):
            await asyncio.sleep(given)
            return web.Response(status=500)
        if isinstance(given, web.Response):
            return given
        message = {"role": "assistant", "content": given}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"id": "1", "object": "chat.completion", "model": body["model"], "choices": [choice]})

    def _refused(self, request: web.Request) -> web.Response | None:
        given = request.headers.get("Authorization", "")
        if self.key is None or given == f"Bearer {self.key}":
            return None
        return web.json_response({"error": {"message": f"Incorrect API key provided: {given}"}}, status=401)


@contextmanager
def serving(answer: Answer, **facts: Any) -> Iterator[ChatServer]:
    """It, on a port of loopback, until the block ends."""
    server = ChatServer(answer, **facts)
    application = web.Application()
    application.add_routes([web.get("/v1/models", server._models), web.post("/v1/chat/completions", server._chat)])
    with on_loopback(application) as address:
        server.url = f"{address}/v1"
        yield server
