"""Reading a manifest from the command line."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from rljob_api import RLJob
from rljob_api.local_files import resolved
from rljob_api.validation import ManifestError, load_manifest
from rljob_api.yaml_text import MAX_BYTES
from rljob_worker.errors import UserError
from rljob_worker.host.paths import check_writable_file

_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?")
_MOST_BYTES = 2**60


def add_manifest_arguments(command: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The manifest and its overrides."""
    command.add_argument(
        "manifest",
        type=_manifest_name,
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


def _manifest_name(text: str) -> str:
    return str(file_name(text))


def bytes_of(quantity: str, option: str) -> int:
    """Bytes of an option's amount of memory; UserError where it is none."""
    from rljob_api.quantities import to_number

    if not _QUANTITY.fullmatch(quantity) or not 0 < to_number(quantity) <= _MOST_BYTES:
        raise UserError(f"{option}: {quantity!r} is no amount of memory; write it like 64Gi")
    return to_number(quantity)


def file_name(text: str) -> Path:
    """A file of the command line; empty (a variable that is not set) is none."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; name a file")
    return Path(text)


def folder_name(text: str) -> Path:
    """A folder of the command line; empty (a variable that is not set) is none."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; name a folder")
    return Path(text)


def require_writable(file: Path, option: str) -> None:
    """Refuse a file of the command line that cannot be written: a folder, or a name where there is no folder."""
    try:
        check_writable_file(file)
    except OSError as error:
        raise UserError(f"{option}: {file}: {error.strerror}") from None


def read_manifest(arguments: argparse.Namespace) -> RLJob:
    """The validated job, with absolute paths of the files beside it; UserError lists everything that is wrong."""
    from_input = arguments.manifest == "-"
    source = _standard_input() if from_input else Path(arguments.manifest)
    try:
        job = load_manifest(source, overrides=arguments.overrides)
        return resolved(job, Path.cwd() if from_input else Path(arguments.manifest).parent)
    except (ManifestError, FileNotFoundError) as error:
        raise UserError(str(error)) from None


def without_outlets(job: RLJob) -> RLJob:
    """The job without what it tells others, and without a run's own checkpoints, which stay as they are."""
    own = {"trackers": [], "tensorboard": False, "http_port": None, "journal": False, "otlp": None}
    spec = job.spec.model_copy(
        update={
            "records": job.spec.records.model_copy(update=own),
            "checkpoint": job.spec.checkpoint.model_copy(update={"path": None}),
        }
    )
    return job.model_copy(update={"spec": spec})


def close_standard_input() -> None:
    """Leave nothing to read there: no library may ask, behind the progress, for leave to do what RLJob does not do."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdin = os.fdopen(0, closefd=False)


def _standard_input() -> str:
    """Text, with a line break that tells it from the name of a file."""
    try:
        text = sys.stdin.read(MAX_BYTES + 1)
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None
    finally:
        close_standard_input()
    if not text.strip():
        raise UserError("standard input holds no manifest")
    return text + "\n"
