"""`rljob validate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rljob_api import RLJob
from rljob_api.problems import ManifestError, Problem
from rljob_worker.cli.manifest import add_manifest_arguments, read_manifest
from rljob_worker.driver.preflight import check_engine_arguments, check_layout
from rljob_worker.errors import UserError
from rljob_worker.host.paths import home_expanded, what_is_at


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "validate",
        help="check a manifest",
        description="Check a manifest by the API's rules, as `kubectl apply` would; prints each problem with its path. "
        "Where the model's folder is on this machine, its config is checked against the parallel sizes too.",
    )
    add_manifest_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Say that the manifest is valid, or list what is wrong."""
    job = read_manifest(arguments)
    check_layout(job.spec)
    check_engine_arguments(list(job.spec.rollout.engine_args))
    problems = _of_local_model(job)
    if problems:
        raise UserError(str(ManifestError(problems, arguments.manifest)))
    print(f"{arguments.manifest}: {job.metadata.name} is valid")
    return 0


def _of_local_model(job: RLJob) -> list[Problem]:
    """What of the job does not fit the config of a model folder on this machine."""
    from rljob_worker.cli.model_folder import config_problems, fit_problems
    from rljob_worker.models.facts import read_hf_config

    folder = _folder(job)
    if folder is None:
        return []
    config = read_hf_config(folder)
    wrong = config_problems(config)
    if wrong:
        where = folder / "config.json"
        return [Problem("spec.model.path", f"{where}: {problem}", "", job.spec.model.path) for problem in wrong]
    return fit_problems(config, job.spec)


def _folder(job: RLJob) -> Path | None:
    """The model's folder, where this machine has it: it may be another machine's, or a hub's."""
    if job.spec.model.path is None:
        return None
    try:
        folder = home_expanded(job.spec.model.path)
        return folder if what_is_at(folder / "config.json") != "nothing" else None
    except OSError as error:
        raise UserError(f"spec.model.path: {job.spec.model.path}: {error.strerror}") from None
