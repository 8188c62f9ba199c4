"""`rljob report`."""

from __future__ import annotations

import argparse

from rljob_worker.cli.manifest import folder_name


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "report",
        help="draw a run's report",
        description="Write report.html and report.png from a run folder's records and print the table of phase "
        "seconds. Works while the run is going on.",
    )
    command.add_argument("folder", metavar="DIR", type=folder_name, help="the run folder")
    command.add_argument(
        "--steps",
        metavar="FIRST[-LAST]",
        type=_steps,
        help="steps whose phases are drawn instant by instant, lane by lane, in lanes.png too (default: five in the "
        "middle of a run whose trainers and engines have devices of their own)",
    )
    command.add_argument(
        "--beside",
        metavar="DIR",
        type=folder_name,
        help="folder of another run, in the charts of report.html too",
    )
    command.set_defaults(run=run)


def _steps(text: str) -> range:
    first, _, last = text.partition("-")
    try:
        steps = range(int(first), int(last or first) + 1)
    except ValueError:
        steps = range(0)
    if not steps or steps.start < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a step like 12, or the first and last of some like 12-15")
    return steps


def run(arguments: argparse.Namespace) -> int:
    """Draw the report."""
    from rljob_worker.records.run_files import EVALUATION_FILE, require_run_folder

    require_run_folder(arguments.folder)
    if arguments.beside is not None:
        require_run_folder(arguments.beside, "--beside")
    if (arguments.folder / EVALUATION_FILE).is_file():
        from rljob_worker.report.evaluation import evaluation_text, read_evaluation, write_evaluation_page

        print(evaluation_text(read_evaluation(arguments.folder)))
        print(f"report  {write_evaluation_page(arguments.folder)}")
        return 0
    # Only now what takes seconds to import.
    from rljob_worker.report.build import build_report
    from rljob_worker.report.table import phase_table_text

    html, png = build_report(arguments.folder, arguments.steps, arguments.beside)
    print(phase_table_text(arguments.folder))
    print(f"report  {html}\n        {png}")
    return 0
