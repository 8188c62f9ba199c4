"""Runs that nothing happens to: one of each row of the fault matrix, for all processes of a run of the tests."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from fault_rows import ROWS, spec_of, steps_of
from jobs import RUN_SECONDS, manifest, run

STEP_SECONDS = 4.0
"""At most, on a busy machine; `make test-faults` has rows of hundreds of steps."""
SAID = "said"
"""Output of the driver, beside the run folder."""


def calm_run(name: str, factory: pytest.TempPathFactory) -> Path:
    """The run folder of a row, with a checkpoint of each step; made by whichever test asks first."""
    folder = _shared(factory) / f"calm-{name.replace(' ', '-')}"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / SAID).exists():
            job = manifest(folder, **spec_of(name, folder, save_every=1))
            seconds = RUN_SECONDS + STEP_SECONDS * steps_of(name)
            code, output = run("run", job, "--output", folder / "run", report=ROWS[name].report, seconds=seconds)
            assert code == 0, output
            (folder / SAID).write_text(output)
    return folder / "run"


def _shared(factory: pytest.TempPathFactory) -> Path:
    """The folder that pytest-xdist makes for all of its processes; without it, this process's."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
