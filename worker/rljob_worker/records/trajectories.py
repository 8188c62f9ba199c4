"""Trajectories: what the policy wrote and how it was scored, one gzip JSONL file a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljob_api.how_many import how_many
from rljob_api.spec import RecordsSpec
from rljob_worker.errors import UserError
from rljob_worker.host.files import WriteFailures
from rljob_worker.records.step_files import read_step_file, step_files, write_step_file

FOLDER = "trajectories"


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
    kept = kept_samples(list(map(len, groups)), spec)
    lines = [_without_nan(sample) for group, count in zip(groups, kept) for sample in group[:count]]
    return write_step_file(run_folder / FOLDER, step, lines, "trajectories", failures or WriteFailures())


def kept_samples(sizes: Sequence[int], spec: RecordsSpec) -> list[int]:
    """Number of samples of each group that are written: whole groups as long as the limit keeps them.

    Of a first group that is larger than the limit there are as many as it allows.
    """
    limit = spec.trajectories_per_step
    if limit is None:
        return list(sizes)
    kept: list[int] = []
    for size in sizes:
        if sum(kept) + size > limit:
            return kept or [limit]
        kept.append(size)
    return kept


def write_evaluated(run_folder: Path, rows: Sequence[dict[str, Any]], failures: WriteFailures) -> Path | None:
    """Write all responses of an evaluation without training, as step 0; the file, None where it cannot be written."""
    return write_step_file(run_folder / FOLDER, 0, map(_without_nan, rows), "trajectories", failures)


def trajectory_files(run_folder: Path) -> dict[int, Path]:
    """Step -> file, of the steps that have one."""
    return step_files(run_folder / FOLDER)


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
    return chosen, read_step_file(files[chosen])


def _steps(files: dict[int, Path]) -> str:
    steps = sorted(files)
    if len(steps) <= 8:
        return "step " + ", ".join(map(str, steps))
    return f"{how_many(len(steps), 'step')}: {', '.join(map(str, steps[:3]))} ... {', '.join(map(str, steps[-3:]))}"


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return value
