"""Runs `program_attacks.py` in a sandbox, as a scoring process does.

`python program_runner.py PID FOLDER [namespaces]`
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, f"{sys.argv[2]}/root")

from rljob_worker.confined.inside import connection_beside
from rljob_worker.sandbox.limits import Limits
from rljob_worker.sandbox.runs import Sandbox

requests = connection_beside() if "namespaces" in sys.argv else None
with Sandbox(requests=requests) as sandbox:
    source = Path(__file__).with_name("program_attacks.py").read_text()
    run = sandbox.begin({"kind": "calls", "source": source}, Limits(2**28, 60))
    assert run.until(lambda: bool(run.lines), time.monotonic() + 60), run.printed_errors
    run.take()
    run.send({"on": None, "name": "attacks", "args": [int(sys.argv[1]), sys.argv[2]], "kwargs": {"dict": []}})
    assert run.until(lambda: bool(run.lines), time.monotonic() + 60), (run.over, run.status, run.printed_errors)
    answer = json.loads(run.take() or b"")
    run.finish()
    # As plain data: mappings are pairs.
    print(json.dumps([dict(group["dict"]) for group in answer["value"]]))
