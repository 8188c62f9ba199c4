"""Touching a sleeping tensor ends the process: each way in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

TOUCHES = {
    "nothing": "pass",
    "read kept": "kept[0].item()",
    "write kept": "kept.add_(1)",
    "read dropped": "dropped.sum().item()",
    "write dropped": "dropped.zero_()",
    "write to the backup": "view.fill_(1)",
    "read the backup after waking up": "arena.resume(); kept.sum().item(); view.sum().item()",
}

# One interpreter forks before any arena exists, so that torch is imported once; each child makes its own arena.
SCRIPT = """
import json, os, sys
import torch
from rljob_worker.memory.arena import Arena

def child(touch):
    arena = Arena(1 << 28)
    kept, dropped = arena.allocate((1000,)), arena.allocate((1000,), tag="discard")
    arena.pause()
    view = arena.backup_view(kept)
    assert view.sum().item() == 0
    exec(touch)
    os._exit(7)

ends = {}
for name, touch in json.loads(sys.argv[1]).items():
    pid = os.fork()
    if pid == 0:
        try:
            child(touch)
        finally:
            os._exit(8)
    ends[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(ends))
"""


def test_touching_ends_the_process() -> None:
    command = [sys.executable, "-c", SCRIPT, json.dumps(TOUCHES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    ends = json.loads(done.stdout)
    assert ends.pop("nothing") == 7
    assert ends == dict.fromkeys(ends, -signal.SIGSEGV)
    assert len(ends) == len(TOUCHES) - 1
