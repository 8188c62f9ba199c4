"""The `rljob` command line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version

from rljob_worker.cli import export, report, run, samples, validate
from rljob_worker.errors import EXIT_USER_ERROR, UserError

_DESCRIPTION = """Colocated reinforcement-learning post-training: Megatron and vLLM take turns on the same devices.

`rljob run JOB.yaml` runs the same manifest on this machine that `kubectl apply` runs on a cluster."""

_EXIT_CODES = """exit codes:
  0   the job succeeded
  1   the job failed; the message says why
  2   the manifest, its data or the command line is wrong; nothing was started
  4   a phase was past its deadline; the stacks of all processes are in the run folder's logs
  75  stopped as asked (SIGTERM, Ctrl-C) after saving; --resume continues"""


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    root = argparse.ArgumentParser(
        prog="rljob",
        description=_DESCRIPTION,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"rljob {version('rljob')}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (run, validate, report, samples, export):
        module.add_command(commands)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except UserError as error:
        print(f"rljob: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
