"""The `rljob` command line."""

from __future__ import annotations

import argparse
import importlib.util
import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rljob_api.safe_text import visible, visible_block
from rljob_api.wire.exit_codes import ExitCode
from rljob_worker.cli.manifest import close_standard_input
from rljob_worker.errors import JobError, StoppedEarly, UserError
from rljob_worker.host.files import explained
from rljob_worker.host.processes import hide_memory
from rljob_worker.host.streams import open_standard_streams

_DESCRIPTION = """Colocated reinforcement-learning post-training: Megatron and vLLM take turns on the same devices.

`rljob run JOB.yaml` runs the same manifest on this machine that `kubectl apply` runs on a cluster."""

_EXIT_CODES = """exit codes:
  0   the job succeeded
  1   the job failed, and the message says why; `plan`: it does not fit; `doctor`: problems were
      found; `replay`: something differs; `score`: nothing could be scored, or a limit is passed;
      `env`: the environment failed
  2   the manifest, its data or the command line is wrong; nothing was started
  4   a phase was past its deadline; the stacks of all processes are in the run folder's logs
  5   a weight hand-over failed, or its verification found wrong weights
  75  stopped as asked (SIGTERM, Ctrl-C) after saving, or (SIGTERM) before anything was started;
      --resume continues
  130 interrupted (Ctrl-C) before anything was started"""


COMMANDS = (
    "run",
    "validate",
    "score",
    "eval",
    "env",
    "plan",
    "doctor",
    "save",
    "profile",
    "report",
    "view",
    "trace",
    "samples",
    "audit",
    "replay",
    "export",
    "import",
    "completion",
)
"""In the order in which they are listed; each is a module beside this one."""
_MODULES = {"import": "import_job"}
"""Commands that Python keeps for itself -> their modules."""


class _Version(argparse.Action):
    """Prints the installed version, which is looked up when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"rljob {version('rljob')}")
        parser.exit()


def parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The command line's grammar; of the command alone that `argv` begins with, since each takes time to import."""
    root = argparse.ArgumentParser(
        prog="rljob",
        description=_DESCRIPTION,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in argv[:1] if argv and argv[0] in COMMANDS else COMMANDS:
        try:
            module = importlib.import_module(f"rljob_worker.cli.{_MODULES.get(name, name)}")
        except ModuleNotFoundError as error:
            if argv and argv[0] == name:
                raise UserError(f"{name}: {_lacks(error)}") from None
            commands.add_parser(name, help=f"not here: {_lacks(error)}")
            continue
        module.add_command(commands)
    return root


def _lacks(error: ModuleNotFoundError) -> str:
    """Message of an installation of the operator alone for a command of the worker; elsewhere the error goes on."""
    if importlib.util.find_spec("numpy") is not None:
        raise error
    return f"{error.name}, a package of the worker, is not installed (docs/install.md)"


class _Visible(logging.Formatter):
    """Messages quote what strangers wrote: responses, the last lines of logs, exceptions of rewards."""

    def format(self, record: logging.LogRecord) -> str:
        # A line of a message must not pass for a message of its own.
        return visible_block(super().format(record), "  ")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    # What the shell gave it (HF_TOKEN) is nothing for other programs of the same user.
    hide_memory()
    open_standard_streams()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Visible("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Samples may hold characters that the terminal's encoding does not have.
            stream.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        grammar = parser(given)
    except UserError as error:
        print(f"rljob: {visible(str(error))}", file=sys.stderr)
        return error.exit_code
    arguments = grammar.parse_args(given)
    if getattr(arguments, "manifest", None) != "-" and not getattr(arguments, "reads_standard_input", False):
        close_standard_input()
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except (UserError, JobError) as error:
        print(f"rljob: {visible(str(error))}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        print(f"rljob: {arguments.command}: {_lacks(error)}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except BrokenPipeError:
        # Whoever read the output has seen enough (`rljob samples DIR | head`); the flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except OSError as error:
        if error.filename is None:
            raise
        found = explained(error, Path(str(error.filename)))
        print(f"rljob: {visible(f'{found.filename}: {found.strerror}')}", file=sys.stderr)
        return ExitCode.FAILED
    except SystemExit as error:
        # A library that ends the process must not make a success of a job that is not done.
        print(f"rljob: ended by sys.exit({error.code!r}) before it was done", file=sys.stderr)
        return ExitCode.FAILED
    except StoppedEarly as error:
        print(f"rljob: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
