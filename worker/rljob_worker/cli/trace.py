"""`rljob trace`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rljob_api.how_many import how_many
from rljob_worker.cli.manifest import file_name, folder_name, require_writable

_DESCRIPTION = """Write a run folder's records as a trace, which https://ui.perfetto.dev and chrome://tracing open: when
the driver was in which phase, when each trainer and engine was at work, steps, resumes and what else
happened, over all attempts. Works while the run is going on, and on one that was killed."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "trace",
        help="write a run as a trace for Perfetto",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("folder", metavar="DIR", type=folder_name, help="the run folder")
    command.add_argument(
        "-o",
        "--output",
        type=file_name,
        metavar="FILE",
        help="where it is written, packed where the name ends with .gz (default: trace.json.gz in the run folder)",
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the trace."""
    from rljob_worker.report.trace import TRACE_FILE, build_trace

    file: Path = arguments.output or arguments.folder / TRACE_FILE
    if arguments.output is not None:
        require_writable(file, "--output")
    events = build_trace(arguments.folder, file)
    print(f"trace   {file}\n        {how_many(events, 'event')}; https://ui.perfetto.dev opens it")
    return 0
