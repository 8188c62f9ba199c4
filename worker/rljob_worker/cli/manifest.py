"""Reading a manifest from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rljob_api import RLJob
from rljob_api.validation import ManifestError, load_manifest
from rljob_worker.errors import UserError


def add_manifest_arguments(command: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The manifest and its overrides."""
    command.add_argument(
        "manifest",
        nargs=None if required else "?",
        metavar="JOB.yaml",
        help="the RLJob manifest; - reads standard input",
    )
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
    source = _standard_input() if arguments.manifest == "-" else Path(arguments.manifest)
    try:
        return load_manifest(source, overrides=arguments.overrides)
    except ManifestError as error:
        raise UserError(str(error)) from None


def _standard_input() -> str | dict[str, Any]:
    """A JSON document, or else YAML text."""
    text = sys.stdin.read()
    if not text.strip():
        raise UserError("standard input holds no manifest")
    try:
        document = json.loads(text)
    except ValueError:
        # A line break tells text from the name of a file.
        return text + "\n"
    return document if isinstance(document, dict) else text + "\n"
