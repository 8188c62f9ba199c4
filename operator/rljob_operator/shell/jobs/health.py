"""/healthz, /readyz and /metrics."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from rljob_operator.metrics import CONTENT_TYPE, JobMetricsStore


async def serve(
    host: str,
    port: int,
    *,
    ready: Callable[[], str],
    metrics_ready: Callable[[], str],
    measure: Callable[[], None],
    store: JobMetricsStore,
) -> web.AppRunner:
    """Serve until the returned runner is cleaned up.

    Args:
        host: address; empty: all.
        port: 0 picks a free one.
        ready: why the caches cannot be trusted; empty: they can.
        metrics_ready: why the jobs' counters are not complete yet; empty: they are.
        measure: brings gauges up to date.
        store: the metrics.
    """

    async def healthz(_: web.Request) -> web.Response:
        return _verdict("")  # A part that breaks ends the process; what is left to see is whether the loop turns.

    async def readyz(_: web.Request) -> web.Response:
        return _verdict(ready())

    async def metrics(request: web.Request) -> web.StreamResponse:
        problem = metrics_ready()
        if problem:
            return _verdict(problem)
        measure()
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        await response.prepare(request)
        for part in store.parts():
            await response.write(part)
        await response.write_eof()
        return response

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, host or None, port).start()
    return runner


def _verdict(problem: str) -> web.Response:
    return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)
