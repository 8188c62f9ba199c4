"""`rljob view`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rljob_api.wire.names import STATUS_PATH
from rljob_worker.cli.manifest import folder_name
from rljob_worker.cli.running_driver import ask_driver
from rljob_worker.errors import JobError, UserError

_PAUSE_SECONDS = 1.0

_DESCRIPTION = """Serve a run's report while the run goes on: the page follows it, and has the samples of every step.
It is served to this machine alone (127.0.0.1), to whoever has the address that is printed: its token is
made anew each time. Of a job that is still starting, its first step is waited for. Ctrl-C ends it."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "view",
        help="serve a run's report, live",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("folder", metavar="DIR", type=folder_name, help="the run folder")
    command.add_argument(
        "--beside", metavar="DIR", type=folder_name, help="folder of another run, drawn in the same charts"
    )
    command.add_argument("--port", type=int, default=0, help="port of the page (default: a free one)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve the page."""
    from rljob_worker.records.run_files import require_run_folder

    require_run_folder(arguments.folder)
    if arguments.beside is not None:
        require_run_folder(arguments.beside, "--beside")
    # Only now what takes seconds to import.
    from rljob_worker.report.live import LiveReport

    try:
        await_first_step(arguments.folder)
    except KeyboardInterrupt:
        return 0
    report = LiveReport(arguments.folder, arguments.beside, arguments.port)
    print(f"view    {report.address}\n        Ctrl-C ends it", flush=True)
    try:
        report.serve()
    except KeyboardInterrupt:
        print()
    return 0


def await_first_step(folder: Path) -> None:
    """Wait for a step record while a driver works toward one; it has deadlines of its own, and goes away past them."""
    from rljob_worker.records.steps import read_steps

    told = False
    while not any(record.is_step for record in read_steps(folder)):
        try:
            ask_driver(folder, STATUS_PATH, "GET")
        except (UserError, JobError):
            # No driver: the report says that there is no step.
            return
        if not told:
            print(f"rljob: waiting for the first step of {folder}", file=sys.stderr, flush=True)
            told = True
        time.sleep(_PAUSE_SECONDS)
