"""`rljob profile`."""

from __future__ import annotations

import argparse

from rljob_api.wire.names import PROFILE_PATH
from rljob_worker.cli.manifest import folder_name
from rljob_worker.cli.running_driver import ask_driver

_DESCRIPTION = """Have a running job profile some steps, operator by operator: torch's or torch_npu's profiler, around
the training of the ranks and the generation of the engines that are named. The files are Chrome traces,
which https://ui.perfetto.dev opens, in DIR/profiles/step-N; the event `profiled` in events.jsonl names them."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "profile",
        help="have a running job profile some steps",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("folder", metavar="DIR", type=folder_name, help="the run folder")
    command.add_argument("--steps", metavar="FIRST[-LAST]", required=True, help="steps that are still to come")
    command.add_argument("--ranks", metavar="N,...", default="0", help="trainers by rank; '': none (default: 0)")
    command.add_argument("--engines", metavar="N,...", default="0", help="engines by number; '': none (default: 0)")
    command.add_argument("--stacks", action="store_true", help="with the Python lines that called each operator")
    command.add_argument("--max-mebibytes", metavar="N", default="512", help="most MiB of all files (default: 512)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask for the profile."""
    from urllib.parse import urlencode

    from rljob_worker.records.run_files import require_run_folder

    require_run_folder(arguments.folder)
    query = {
        "steps": arguments.steps,
        "ranks": arguments.ranks,
        "engines": arguments.engines,
        "stacks": str(arguments.stacks).lower(),
        "maxMebibytes": arguments.max_mebibytes,
    }
    ask_driver(arguments.folder, f"{PROFILE_PATH}?{urlencode(query)}", "POST")
    said = "steps" if "-" in arguments.steps else "step"
    print(f"{said} {arguments.steps} will be profiled; the files will be in {arguments.folder / 'profiles'}")
    return 0
