"""`rljob save`."""

from __future__ import annotations

import argparse

from rljob_api.wire.names import CHECKPOINT_PATH
from rljob_worker.cli.manifest import folder_name
from rljob_worker.cli.running_driver import ask_driver


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
    ask_driver(arguments.folder, CHECKPOINT_PATH, "POST")
    print("a checkpoint is taken at the end of the running step")
    return 0
