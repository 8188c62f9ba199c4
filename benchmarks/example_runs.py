"""An example as a job of its own process, and the records of its steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rljob_api.wire.step_record import StepRecord
from rljob_worker.records.steps import read_steps

EXAMPLES = Path(__file__).parents[1] / "examples"
ONE_THREAD = "spec.resources.threadsPerDevice=1"
"""For runs whose learning counts, not speed: threads that wait for each other spin on a machine that others use."""
SECONDS = 3600


def run_example(example: str, folder: Path, name: str, settings: Sequence[str]) -> list[StepRecord]:
    """Run an example with settings (`FIELD=VALUE`) to its end; SystemExit with its output where it failed."""
    command = [sys.executable, "-m", "rljob_worker.cli.main", "run", str(EXAMPLES / f"{example}.yaml")]
    command += [f"--set={setting}" for setting in settings]
    with open(folder / f"{name}.log", "w+") as log:
        done = subprocess.run(
            [*command, "--output", str(folder / name)], stdout=log, stderr=log, timeout=SECONDS, cwd=EXAMPLES.parent
        )
        if done.returncode:
            log.seek(0)
            raise SystemExit(log.read())
    return read_steps(folder / name)
