"""Reading a manifest from the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from rljob_api import RLJob
from rljob_api.validation import ManifestError, check_runnable_locally, load_manifest
from rljob_worker.errors import UserError


def add_manifest_arguments(command: argparse.ArgumentParser) -> None:
    """The manifest and its overrides."""
    command.add_argument("manifest", metavar="JOB.yaml", help="the RLJob manifest")
    command.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="override a field, e.g. --set spec.steps=5 (may be given several times)",
    )


def read_manifest(arguments: argparse.Namespace) -> RLJob:
    """The validated job; UserError lists everything that is wrong with it."""
    try:
        job = load_manifest(Path(arguments.manifest), overrides=arguments.overrides)
        check_runnable_locally(job)
    except ManifestError as error:
        raise UserError(str(error)) from None
    return job
