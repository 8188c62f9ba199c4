"""Trajectories: what the policy wrote and how it was scored, one gzip JSONL file a step."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljob_api.spec import RecordsSpec
from rljob_worker.errors import UserError
from rljob_worker.host.files import WriteFailures, read_file, replacing

FOLDER = "trajectories"
_NAME = re.compile(r"^step-(\d{6,})\.jsonl\.gz$")


def write_trajectories(
    run_folder: Path,
    spec: RecordsSpec,
    step: int,
    groups: Sequence[Sequence[dict[str, Any]]],
    failures: WriteFailures | None = None,
) -> Path | None:
    """Write the samples of a step if its turn has come; returns the file, None also where it cannot be written.

    Args:
        run_folder: the run's folder.
        spec: how often and how many.
        step: the step.
        groups: the samples of each prompt; the limit keeps whole groups as long as it can.
        failures: where a file that cannot be written is noted.
    """
    if not spec.trajectories_every_steps or step % spec.trajectories_every_steps:
        return None
    limit = spec.trajectories_per_step
    samples: list[dict[str, Any]] = []
    for group in groups:
        if limit is not None and len(samples) + len(group) > limit:
            samples = samples or list(group[:limit])
            break
        samples += group
    folder = run_folder / FOLDER
    path = folder / f"step-{step:06d}.jsonl.gz"
    text = "".join(json.dumps(_without_nan(sample)) + "\n" for sample in samples)
    content = gzip.compress(text.encode(), compresslevel=1)
    with (failures or WriteFailures()).tolerated("trajectories", path):
        folder.mkdir(exist_ok=True)
        with replacing(path, durable=False, wanted=len(content)) as file:
            file.write(content)
        return path
    return None


def trajectory_files(run_folder: Path) -> dict[int, Path]:
    """Step -> file, of the steps that have one."""
    folder = run_folder / FOLDER
    names = [(path, _NAME.match(path.name)) for path in folder.iterdir()] if folder.is_dir() else []
    return {int(match.group(1)): path for path, match in names if match}


def read_trajectories(run_folder: Path, step: int | None = None) -> tuple[int, list[dict[str, Any]]]:
    """The samples of a step (default: the newest one written) and that step.

    Raises:
        UserError: no trajectories of it, saying which steps there are; or its file is damaged.
    """
    files = trajectory_files(run_folder)
    if not files:
        raise UserError(
            f"{run_folder / FOLDER}: no trajectories yet (spec.records.trajectoriesEverySteps says how often)"
        )
    chosen = max(files) if step is None else step
    if chosen not in files:
        raise UserError(f"{run_folder / FOLDER}: no trajectories of step {chosen}; there are those of {_steps(files)}")
    try:
        with gzip.open(io.BytesIO(read_file(files[chosen])), "rb") as file:
            return chosen, [json.loads(line) for line in file]
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise UserError(f"{files[chosen]}: damaged: {error}") from None


def _steps(files: dict[int, Path]) -> str:
    steps = sorted(files)
    if len(steps) <= 8:
        return "step " + ", ".join(map(str, steps))
    return f"{len(steps)} steps: {', '.join(map(str, steps[:3]))} ... {', '.join(map(str, steps[-3:]))}"


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return value
