"""How the processes of a host find plan and slots: one trainer writes a file in the sync's folder, all read it."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

from rljob_worker.weightsync.errors import WeightSyncError
from rljob_worker.weightsync.plan import SyncPlan

_FILE = "plan.json"
_POLL_SECONDS = 0.005


def run_name(folder: str | Path) -> str:
    """The part of the slots' names that tells runs apart, from the folder's own name."""
    return re.sub(r"[^A-Za-z0-9_.]", ".", Path(folder).name)[:64] or "run"


def publish(folder: str | Path, plan: SyncPlan, slot_names: tuple[str, ...]) -> None:
    """Write plan and slots for the others; they see all of it or nothing."""
    temporary = Path(folder) / f"{_FILE}.{os.getpid()}"
    temporary.write_text(json.dumps({"plan": plan.to_json(), "slots": slot_names}))
    temporary.rename(Path(folder) / _FILE)


def find(folder: str | Path, deadline: float) -> tuple[SyncPlan, tuple[str, ...]]:
    """Wait for plan and slots until `deadline` (`time.monotonic()`); WeightSyncError when they do not come."""
    path = Path(folder) / _FILE
    while not path.exists():
        if time.monotonic() > deadline:
            raise WeightSyncError(f"deadline passed while waiting for {path}: the first sending trainer did not start")
        time.sleep(_POLL_SECONDS)
    value = json.loads(path.read_text())
    return SyncPlan.from_json(value["plan"]), tuple(value["slots"])
