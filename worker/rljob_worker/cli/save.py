"""`rljob save`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from rljob_api.wire.names import CHECKPOINT_PATH, DRIVER_TOKEN_VARIABLE
from rljob_api.wire.run_status import ADDRESS_FILE, TOKEN_FILE
from rljob_worker.cli.manifest import folder_name
from rljob_worker.errors import JobError, UserError
from rljob_worker.host.files import read_file

_SECONDS = 10.0
_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""What is listened on -> what leads there."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "save",
        help="have a running job save a checkpoint",
        description="Ask the driver that runs in a run folder for a checkpoint after the running step. Its address and "
        "token are read from the folder (RLJOB_DRIVER_TOKEN, where the driver was given one).",
    )
    command.add_argument("folder", metavar="DIR", type=folder_name, help="the run folder")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask for the checkpoint."""
    from rljob_worker.records.run_files import require_run_folder

    require_run_folder(arguments.folder)
    _ask(arguments.folder, CHECKPOINT_PATH, "POST")
    print("a checkpoint is taken at the end of the running step")
    return 0


def _ask(folder: Path, path: str, method: str) -> None:
    # Slow to import, and every command imports this module.
    from urllib import error as url_error
    from urllib import request as url_request

    try:
        address = json.loads(read_file(folder / ADDRESS_FILE))
        host, port = str(address["host"]), int(address["port"])
        token = os.environ.get(DRIVER_TOKEN_VARIABLE) or read_file(folder / TOKEN_FILE).decode("ascii").strip()
    except FileNotFoundError as error:
        raise UserError(
            f"{folder}: no driver of it runs on this machine: there is no {Path(error.filename).name}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / ADDRESS_FILE}: not the address of a driver: {error}") from None
    host = _HERE.get(host, host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"
    request = url_request.Request(url, method=method, headers={"Authorization": f"Bearer {token}"})
    # A proxy of the shell's is not asked for this machine's own.
    opener = url_request.build_opener(url_request.ProxyHandler({}))
    try:
        opener.open(request, timeout=_SECONDS).close()
    except url_error.HTTPError as error:
        said = error.read(1000).decode(errors="replace")
        raise JobError(f"{folder}: the driver at {host}:{port} answers {error.code}: {said}") from None
    except OSError as error:
        raise JobError(f"{folder}: no driver answers at {host}:{port} ({error}); did it end?") from None
