"""Faults of a job's paths that are found at once: the worker's own checks come after imports that take seconds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rljob_api import RLJob
from rljob_api.derived import NodeGroup
from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.checkpoints.run_folder import folder_error
from rljob_worker.cli.environments import check_environment_code
from rljob_worker.cli.model_folder import check_folders_beside, check_model_folder, local_folder
from rljob_worker.data.chat import read_template
from rljob_worker.data.sources import check_path, data_sources, evaluation_sources
from rljob_worker.driver.preflight import (
    check_engine_arguments,
    check_layout,
    check_library,
    check_port,
    check_processes,
    check_trackers,
)
from rljob_worker.errors import UserError
from rljob_worker.host.memory import HostMemory
from rljob_worker.host.paths import check_writable_folder
from rljob_worker.models.judge_model import check_judge_folder
from rljob_worker.records.run_files import read_run
from rljob_worker.rewards.judge_texts import check_prompts
from rljob_worker.rewards.row_check import check_first_rows
from rljob_worker.rewards.source_check import check_filter, check_sources
from rljob_worker.sandbox.servers import servers


def look_first(
    job: RLJob,
    output: Path,
    resume: str | None,
    *,
    on_this_machine: bool,
    model: bool = True,
    groups: Sequence[NodeGroup] | None = None,
) -> None:
    """Refuse paths of the manifest and the command line that lead nowhere, or to what they should not.

    Args:
        job: the job.
        output: its run folder.
        resume: as given on the command line.
        on_this_machine: its processes run here, not on the nodes of a Ray cluster.
        model: whether `spec.model` is used.
        groups: what its nodes hold; None: trainers and engines.

    Raises:
        UserError: naming field or option.
        JobError: what may pass: a full or failing disk, a taken port.
    """
    spec = job.spec
    _check_folder(output, "a run folder")
    if spec.checkpoint.path is not None:
        _check_folder(Path(spec.checkpoint.path), "spec.checkpoint.path")
    if resume == "always":
        _check_resumable(output, spec.checkpoint.path)
    check_layout(spec)
    if spec.sandbox is not None:
        servers(spec.sandbox)
    if on_this_machine:
        check_library(spec)
        check_processes(spec, len(os.sched_getaffinity(0)), HostMemory().info().total, groups)
    check_trackers(spec)
    check_port(spec.records.http_host, spec.records.http_port)
    check_engine_arguments(list(spec.rollout.engine_args))
    folder = local_folder(spec.model) if model else None
    if folder is not None:
        check_model_folder(folder, spec)
    columns: dict[str, frozenset[str] | None] = {}
    for field, source in data_sources(spec) + evaluation_sources(spec):
        check_path(source, field)
        columns[field] = check_first_rows(spec, source, field)
        read_template(source, field)
    check_sources(spec)
    check_filter(spec, columns)
    check_prompts(spec.judges)
    check_judge_folder(spec)
    check_folders_beside(spec)
    check_environment_code(spec)


def _check_folder(path: Path, what: str) -> None:
    try:
        check_writable_folder(path)
    except OSError as error:
        raise folder_error(error, path, what) from None


def _check_resumable(output: Path, checkpoints: str | None) -> None:
    if read_run(output) is None and not (checkpoints and Checkpoints(Path(checkpoints)).complete_steps()):
        raise UserError(f"--resume: {output} holds no run to continue; leave --resume out to begin one there")
