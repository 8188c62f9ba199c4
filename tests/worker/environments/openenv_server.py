"""A server that is written from OpenEnv's protocol: `python openenv_server.py MOST` prints its port.

Its actions are `{"message": TEXT}`, a text without blanks at its ends. `GET /sessions` tells how many are open, `GET
/ping` pings them and returns when all have answered, `/away/ws` redirects. What is said: `raise` is answered with an
error, `die` ends the server, `hang` is not answered, `leave` ends the session, `leave-once` ends the first that says
it, `twice` is answered twice, `bytes`, `list` and `long` are answered with what is none of the protocol.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys

from aiohttp import WSMsgType, web

MOST = int(sys.argv[1])
sessions: dict[int, web.WebSocketResponse] = {}
pongs: asyncio.Queue[int] = asyncio.Queue()
numbers = itertools.count()
left: set[str] = set()


def observation(text: str, reward: float | None, done: bool) -> dict[str, object]:
    data = {"observation": {"text": text, "legal": [1, 2]}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code: str, message: str, **more: object) -> dict[str, object]:
    return {"type": "error", "data": {"code": code, "message": message, **more}}


def refused(action: dict[str, object]) -> list[dict[str, object]]:
    """Errors as pydantic lists them."""
    found = [
        {"type": "extra_forbidden", "loc": [name], "msg": "Extra inputs are not permitted"}
        for name in action
        if name != "message"
    ]
    if "message" not in action:
        return [{"type": "missing", "loc": ["message"], "msg": "Field required"}, *found]
    said = str(action["message"])
    return found + [{"type": "value_error", "loc": ["message"], "msg": "no blank ends"}] * (said != said.strip())


async def play(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse(autoping=False)
    await socket.prepare(request)
    if len(sessions) >= MOST:
        await socket.send_json(error("CAPACITY_REACHED", "full"))
        await socket.close()
        return socket
    number = next(numbers)
    sessions[number] = socket
    try:
        await turns(socket, number)
    finally:
        del sessions[number]
    await socket.close()
    return socket


async def turns(socket: web.WebSocketResponse, number: int) -> None:
    steps = 0
    async for message in socket:
        if message.type is WSMsgType.PONG:
            pongs.put_nowait(number)
            continue
        asked = message.json()
        if asked["type"] == "close":
            return
        if asked["type"] == "reset":
            seed, steps = asked["data"]["seed"], 0
            over = error("FACTORY_ERROR", "no machine") if seed == 13 else observation(f"seed {seed}", None, seed == 14)
            await socket.send_json(over)
            continue
        if errors := refused(asked["data"]):
            await socket.send_json(error("VALIDATION_ERROR", "Invalid message", errors=errors))
            continue
        said, steps = asked["data"]["message"], steps + 1
        if said == "die":
            os._exit(0)
        if said == "leave" or (said == "leave-once" and said not in left):
            left.add(said)
            return
        if said == "hang":
            continue
        if said == "raise":
            await socket.send_json(error("EXECUTION_ERROR", "no such move"))
        elif said == "bytes":
            await socket.send_bytes(b"{}")
        elif said in ("list", "long"):
            await socket.send_json([] if said == "list" else "x" * 2**23)
        else:
            if said == "twice":
                await socket.send_json(observation(f"{said} {steps}", 0.5 * steps, False))
            await socket.send_json(observation(f"{said} {steps}", 0.5 * steps, said == "end"))


async def count(request: web.Request) -> web.Response:
    return web.json_response(len(sessions))


async def ping(request: web.Request) -> web.Response:
    wanted = set(sessions)
    for number in wanted:
        await sessions[number].ping()
    while wanted:
        wanted.discard(await pongs.get())
    return web.json_response("pong")


async def away(request: web.Request) -> web.Response:
    raise web.HTTPFound("/env/ws")


async def main() -> None:
    app = web.Application()
    for path, handler in (("/env/ws", play), ("/sessions", count), ("/ping", ping), ("/away/ws", away)):
        app.router.add_get(path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)  # type: ignore[union-attr]
    await asyncio.Event().wait()


asyncio.run(main())
