"""How the processes of a host find plan and slots: trainers write files in the sync's folder, all read them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljob_worker.weightsync.errors import WeightSyncError
from rljob_worker.weightsync.plan import SyncPlan

_FILE = "plan.json"
_POLL_SECONDS = 0.005


def run_name(folder: str | Path) -> str:
    """The part of the slots' names that tells runs apart, from the folder's own name."""
    return re.sub(r"[^A-Za-z0-9_.]", ".", Path(folder).name)[:64] or "run"


def publish(folder: str | Path, plan: SyncPlan, slot_names: tuple[str, ...]) -> None:
    """Write plan and slots for the others; they see all of it or nothing."""
    _write(Path(folder) / _FILE, {"plan": plan.to_json(), "slots": slot_names})


def find(folder: str | Path, deadline: float) -> tuple[SyncPlan, tuple[str, ...]]:
    """Wait for plan and slots until `deadline` (`time.monotonic()`); WeightSyncError when they do not come."""
    value = _read(Path(folder) / _FILE, deadline, "the first sending trainer did not start")
    return SyncPlan.from_json(value["plan"]), tuple(value["slots"])


def publish_device(folder: str | Path, identity: str, handles: Sequence[str]) -> None:
    """Write where the slots of one device are."""
    _write(_device_file(folder, identity), {"device": identity, "handles": list(handles)})


def find_device(folder: str | Path, identity: str, deadline: float) -> list[str]:
    """Wait for a device's slots until `deadline`; WeightSyncError when no trainer has that device."""
    value = _read(_device_file(folder, identity), deadline, f"no trainer on this host has device {identity}")
    return list(value["handles"])


def _device_file(folder: str | Path, identity: str) -> Path:
    return Path(folder) / f"device-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _write(path: Path, value: object) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value))
    temporary.rename(path)


def _read(path: Path, deadline: float, missing: str) -> Any:
    while not path.exists():
        if time.monotonic() > deadline:
            raise WeightSyncError(f"deadline passed while waiting for {path}: {missing}")
        time.sleep(_POLL_SECONDS)
    return json.loads(path.read_text())
