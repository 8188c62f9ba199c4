"""Command of the process that programs are forked from."""

from __future__ import annotations

import sys
from pathlib import Path

from rljob_worker.confined.beside import BESIDE_DESCRIPTOR, Beside
from rljob_worker.sandbox import fork_server
from rljob_worker.sandbox.limits import variables
from rljob_worker.sandbox.namespaces import wrapped

_ROOT = str(Path(__file__).parents[2])
_PROGRAM = (
    f"import sys; sys.path.insert(0, sys.argv[1]); from {fork_server.__name__} import main; "
    "sys.path.remove(sys.argv[1]); main(sys.argv[2:])"
)


def command(descriptor: int, *options: str, tests: bool) -> list[str]:
    """The command, whose requests come over that descriptor; `tests`: programs are tested by pytest."""
    more = [*options, *(["tests"] if tests else [])]
    return [sys.executable, "-I", "-c", _PROGRAM, _ROOT, str(descriptor), *more]


def beside(*, tests: bool) -> Beside:
    """A server in namespaces of its own, which a keeper starts. Raises FileNotFoundError without bubblewrap."""
    wrapped_command = wrapped(command(BESIDE_DESCRIPTOR, fork_server.NAMESPACES, tests=tests))
    return Beside(wrapped_command, tuple(variables().items()))
