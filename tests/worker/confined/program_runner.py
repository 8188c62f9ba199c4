"""Runs `program_attacks.py` in a sandbox, as a scoring process does.

`python program_runner.py PID FOLDER [namespaces]`
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path


def outcomes(
    victim: int, folder: str, requests: socket.socket | None = None, seconds: float = 60.0
) -> list[dict[str, str]]:
    """Errors by name: of attacks, and of what is allowed. An empty one says that it was done.

    Args:
        victim: process that is attacked.
        folder: of what the attacks look for.
        requests: of `Sandbox`.
        seconds: for its start, and for the attacks.
    """
    from rljob_worker.sandbox.limits import Limits
    from rljob_worker.sandbox.runs import Sandbox

    with Sandbox(requests=requests) as sandbox:
        source = Path(__file__).with_name("program_attacks.py").read_text()
        run = sandbox.begin({"kind": "calls", "source": source}, Limits(2**28, 60))
        assert run.until(lambda: bool(run.lines), time.monotonic() + seconds), run.printed_errors
        run.take()
        run.send({"on": None, "name": "attacks", "args": [victim, folder], "kwargs": {"dict": []}})
        ended = run.until(lambda: bool(run.lines), time.monotonic() + seconds)
        assert ended, (run.over, run.status, run.printed_errors)
        answer = json.loads(run.take() or b"")
        run.finish()
    # As plain data: mappings are pairs.
    return [dict(group["dict"]) for group in answer["value"]]


if __name__ == "__main__":
    sys.path.insert(0, f"{sys.argv[2]}/root")

    from rljob_worker.confined.inside import connection_beside

    beside = connection_beside() if "namespaces" in sys.argv else None
    print(json.dumps(outcomes(int(sys.argv[1]), sys.argv[2], beside)))
