"""An aiohttp application served by a thread of its own inside a network namespace."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from network import Network

_START_SECONDS = 60.0


class Server:
    """Serves one handler for all paths on a free port of the namespace's loopback; `start` to `stop`."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._socket = network.listen("127.0.0.1")
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._stopped: asyncio.Event
        self._started = threading.Event()

    @property
    def url(self) -> str:
        """Address inside the namespace."""
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        raise NotImplementedError

    @asynccontextmanager
    async def resources(self) -> AsyncIterator[None]:
        """Resources that the handler needs while it serves."""
        yield

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()
        if not self._started.wait(_START_SECONDS):
            raise RuntimeError(f"{type(self).__name__} did not start")

    def stop(self) -> None:
        """Stop serving; open connections are closed."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(_START_SECONDS)

    def call(self, function: Callable[[], Awaitable[Any]], seconds: float = 10.0) -> Any:
        """Run a coroutine function in the server's loop and return its result."""

        async def body() -> Any:
            return await function()

        return asyncio.run_coroutine_threadsafe(body(), self._loop).result(seconds)

    def _run(self) -> None:
        self._network.enter()
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, auto_decompress=False)
        async with self.resources():
            await runner.setup()
            await web.SockSite(runner, self._socket).start()
            self._started.set()
            await self._stopped.wait()
            await runner.cleanup()
