"""`rljob validate`."""

from __future__ import annotations

import argparse
import importlib.util

from rljob_api.beyond import beyond_the_job
from rljob_worker.cli.manifest import add_manifest_arguments, read_manifest


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "validate",
        help="check a manifest",
        description="Check a manifest by the API's rules, as `kubectl apply` would; prints each problem with its path. "
        "Where the model's folder is on this machine, its files and its config are checked too; where the data are, "
        "all of their rows; where both are, the first prompt is shown as the policy will get it. Environments are "
        "reset and stepped in processes like a job's. Without the worker's packages (an installation of the operator) "
        "the API's rules are all that is checked, and it says so.",
    )
    add_manifest_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Say that the manifest is valid, or list what is wrong."""
    job = read_manifest(arguments)
    lines = ["by the API's rules; model, data and rewards are looked at where the worker's packages are installed"]
    if importlib.util.find_spec("numpy") is not None:
        from rljob_worker.cli.validate_here import look

        lines = look(job, arguments.manifest)
    lines += [f"warning: {said}" for said in beyond_the_job(job.spec)]
    print(f"{arguments.manifest}: {job.metadata.name} is valid", *lines, sep="\n")
    return 0
