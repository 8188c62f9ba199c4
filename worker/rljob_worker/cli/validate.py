"""`rljob validate`."""

from __future__ import annotations

import argparse
from typing import Any

from rljob_worker.cli.manifest import add_manifest_arguments, read_manifest


def add_command(commands: Any) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "validate",
        help="check a manifest",
        description="Check a manifest by the API's rules, as `kubectl apply` would; prints each problem with its path.",
    )
    add_manifest_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Say that the manifest is valid, or list what is wrong."""
    job = read_manifest(arguments)
    print(f"{arguments.manifest}: {job.metadata.name} is valid")
    return 0
