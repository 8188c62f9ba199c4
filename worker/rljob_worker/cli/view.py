"""`rljob view`."""

from __future__ import annotations

import argparse

from rljob_worker.cli.manifest import folder_name

_DESCRIPTION = """Serve a run's report while the run goes on: the page follows it, and has the samples of every step.
It is served to this machine alone (127.0.0.1), to whoever has the address that is printed: its token is
made anew each time. Ctrl-C ends it."""


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

    report = LiveReport(arguments.folder, arguments.beside, arguments.port)
    print(f"view    {report.address}\n        Ctrl-C ends it", flush=True)
    try:
        report.serve()
    except KeyboardInterrupt:
        print()
    return 0
