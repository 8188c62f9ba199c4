"""`rljob validate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rljob_api import RLJob
from rljob_api.blocks import path_text
from rljob_api.problems import ManifestError, Problem
from rljob_api.rules.model_config import MODEL_TYPES, parallel_findings
from rljob_worker.cli.manifest import add_manifest_arguments, read_manifest
from rljob_worker.errors import UserError


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
    problems = _of_local_model(job)
    if problems:
        raise UserError(str(ManifestError(problems, arguments.manifest)))
    print(f"{arguments.manifest}: {job.metadata.name} is valid")
    return 0


def _of_local_model(job: RLJob) -> list[Problem]:
    """What of the job does not fit the config of a model folder on this machine."""
    from rljob_worker.models.config import read_hf_config

    folder = Path(job.spec.model.path or "").expanduser()
    if job.spec.model.path is None or not (folder / "config.json").is_file():
        return []
    config = read_hf_config(folder)
    if config.get("model_type") not in MODEL_TYPES:
        wrong = f"{folder / 'config.json'} has model_type {config.get('model_type')!r}, which is not built"
        return [Problem("spec.model.path", wrong, ", ".join(MODEL_TYPES), job.spec.model.path)]
    return [
        Problem(path_text(("spec", *finding.path)), finding.wrong, finding.allowed)
        for finding in parallel_findings(config, job.spec)
    ]
