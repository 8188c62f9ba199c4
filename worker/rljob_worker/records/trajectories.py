"""Trajectories: what the policy wrote and how it was scored, one gzip JSONL file a step."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljob_api.spec import RecordsSpec
from rljob_worker.errors import UserError

FOLDER = "trajectories"


def write_trajectories(
    run_folder: Path, spec: RecordsSpec, step: int, samples: Sequence[dict[str, Any]], group: int
) -> Path | None:
    """Write the samples of a step if its turn has come.

    Args:
        run_folder: the run's folder.
        spec: how often and how many.
        step: the step.
        samples: prompt-major samples.
        group: samples of one prompt; the limit keeps whole groups as long as it can.
    """
    if not spec.trajectories_every_steps or step % spec.trajectories_every_steps:
        return None
    limit = spec.trajectories_per_step
    if limit is not None and limit < len(samples):
        samples = samples[: max(limit - limit % group, min(limit, group))]
    folder = run_folder / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:06d}.jsonl.gz"
    temporary = path.with_suffix(".tmp")
    with gzip.open(temporary, "wt", compresslevel=1) as file:
        for sample in samples:
            file.write(json.dumps(sample) + "\n")
    temporary.replace(path)
    return path


def read_trajectories(run_folder: Path, step: int | None = None) -> tuple[int, list[dict[str, Any]]]:
    """The samples of a step (default: the newest one written); UserError says which steps there are."""
    folder = run_folder / FOLDER
    files = {int(path.name[5:11]): path for path in folder.glob("step-*.jsonl.gz")}
    if not files:
        raise UserError(f"{folder}: no trajectories were written (spec.records.trajectoriesEverySteps)")
    chosen = max(files) if step is None else step
    if chosen not in files:
        raise UserError(f"{folder}: no trajectories of step {chosen}; there are steps {min(files)} to {max(files)}")
    with gzip.open(files[chosen], "rt") as file:
        return chosen, [json.loads(line) for line in file]
