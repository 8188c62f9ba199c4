"""A web application of a test, in a thread of its own on a port of loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def on_loopback(application: web.Application) -> Iterator[str]:
    """Its address, until the block ends."""
    loop, started, end = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    addresses: list[str] = []

    async def run() -> None:
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        addresses.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()
        await end.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(60)
        loop.close()
