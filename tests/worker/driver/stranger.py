"""Attempts of another user of the machine on a run's ports: `python stranger.py MARKER PORT...`, by root; prints JSON.

`posted`: ports that took a job; `set`: ports where a key-value store took a key; `kept`: where Ray's own one did;
`joined`: where a driver could join.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

SECONDS = 4
LONGEST_SECONDS = 60
STRANGER = 65534
PATHS = ("/api/job_agent/jobs/", "/api/jobs/", "/")


def http(port: int, marker: str) -> bool:
    """Whether a job can be posted; asks for pages first."""
    taken = False
    body = json.dumps({"entrypoint": f"touch {marker}", "runtime_env": {}}).encode()
    for path in PATHS:
        for data in (None, body):
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=2) as answer:
                    taken |= data is not None and answer.status < 300 and b"submission_id" in answer.read()
            except (OSError, urllib.error.HTTPError, ValueError):
                continue
            except Exception:  # what answers is not HTTP
                continue
    return taken


def store(port: int) -> bool:
    """Set every key that means something to the trainers."""
    from torch.distributed import PrefixStore, TCPStore

    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    for prefixed in (client, PrefixStore("default_pg", client)):
        for step in range(1000):
            prefixed.set(f"rljob/stop/0/{step}", "0")
            prefixed.set(f"rljob/release/{step}/0", "")
    return client.get("rljob/stop/0/0") == b"0"


def keep(port: int) -> bool:
    """Set a key in the store of Ray's head, which needs no file of its session."""
    import ray._raylet

    connect: Callable[..., Any] = vars(ray._raylet)["GcsClient"]
    client = connect(address=f"127.0.0.1:{port}")
    client.internal_kv_put(b"stranger", b"was here", True, b"rljob", timeout=SECONDS)
    return bool(client.internal_kv_get(b"stranger", b"rljob", timeout=SECONDS) == b"was here")


def join(port: int) -> bool:
    """Join as a driver."""
    import ray

    try:
        ray.init(address=f"127.0.0.1:{port}", log_to_driver=False)
    except BaseException:
        return False
    return True


def tried(attempts: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], seconds: float) -> list[Any]:
    """Results of functions for their arguments, side by side in processes; None: nothing within some seconds."""
    running = []
    for target, arguments in attempts:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(writer, json.dumps(target(*arguments)).encode())
            finally:
                os._exit(0)
        os.close(writer)
        running.append((pid, reader))
    deadline = time.monotonic() + seconds
    found = []
    for pid, reader in running:
        ready = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]
        answer = os.read(reader, 4096) if ready else b""
        found.append(json.loads(answer) if answer else None)
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found


def become_another_user() -> None:
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    try:
        os.setuid(0)
    except PermissionError:
        return
    raise SystemExit("still root")


def main(marker: str, ports: list[int]) -> None:
    # The interpreter's own folders may be closed to others: what is needed is imported before.
    import ray  # noqa: F401
    import torch.distributed  # noqa: F401

    become_another_user()
    attacks: dict[str, tuple[Any, ...]] = {
        "posted": (http, marker),
        "set": (store,),
        "kept": (keep,),
        "joined": (join,),
    }
    attempts = [(attack, (port, *more)) for attack, *more in attacks.values() for port in ports]
    done = iter(tried(attempts, LONGEST_SECONDS))
    result = {name: [port for port in ports if next(done)] for name in attacks}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], [int(port) for port in sys.argv[2:]])
