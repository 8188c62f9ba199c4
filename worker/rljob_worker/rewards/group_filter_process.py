"""The process of a group filter: `python -m rljob_worker.rewards.group_filter_process FD`.

The driver sends a pickled `FilterSetup`, answered in JSON by `["ready"]`, `["refused", what the user can change]` or
`["failed", text]`; then `(number, arguments)`, answered by `[number, "keep", true or false]` or
`[number, "error", text]`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# By its name: a reward's own `json.dumps = ...` must not change what is answered.
from json import dumps
from multiprocessing.connection import Connection
from typing import Any

from rljob_worker.confined.inside import adapt
from rljob_worker.confined.loading import load_named, out_of_reach, text_of
from rljob_worker.errors import UserError
from rljob_worker.rewards.functions import REACH
from rljob_worker.rewards.parameters import Parameters, parameters_of

FIELD = "rollout.oversampling.function"
GIVEN = ("rewards", "prompt", "label")
"""Names that the function can ask for, beside the row's other columns."""


@dataclass(frozen=True)
class FilterSetup:
    """A function, and the names that it can ask for.

    Attributes:
        function: `package.module:function` or `FILE.py:function`.
        columns: that the rows of all sources have beside prompt and label; None: not known.
    """

    function: str
    columns: frozenset[str] | None = None


def main() -> None:
    """Answer until the driver closes the connection."""
    connection = Connection(int(sys.argv[1]))
    adapt()
    try:
        setup: FilterSetup = connection.recv()
        try:
            keeps = caller(setup)
        except UserError as error:
            _answer(connection, "refused", f"spec.{error}")
            return
        except (Exception, SystemExit) as error:
            _answer(connection, "failed", f"spec.{FIELD}: {type(error).__name__}: {text_of(error)}")
            return
        _answer(connection, "ready")
        while True:
            number, given = connection.recv()
            try:
                _answer(connection, number, "keep", verdict(keeps(given)))
            except BaseException as error:
                said = f"{type(error).__name__}: {text_of(error)}{out_of_reach(error, REACH)}"
                _answer(connection, number, "error", said)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def caller(setup: FilterSetup) -> Callable[[Mapping[str, Any]], Any]:
    """The function, called with what it asks for by name; UserError where it cannot be."""
    function, path = load_named(setup.function, FIELD, "function", REACH), setup.function
    if not callable(function):
        raise UserError(f"{FIELD}: {path!r} is not a function but {type(function).__name__}")
    try:
        found = parameters_of(function)
    except (TypeError, ValueError) as error:
        raise UserError(f"{FIELD}: {path!r} does not tell its parameters ({error}): wrap it in a def") from error
    check_call(path, found, setup.columns)

    def call(given: Mapping[str, Any]) -> Any:
        return function(**(given if found.takes_any else {name: given[name] for name in found.names if name in given}))

    return call


def check_call(path: str, found: Parameters, columns: frozenset[str] | None) -> None:
    """UserError where a function cannot be called with what there is.

    Args:
        path: of the function.
        found: its parameters.
        columns: as of `FilterSetup`.
    """
    if found.is_async:
        raise UserError(f"{FIELD}: {path!r} is async; a plain def is called, one group after the other")
    for name in found.by_place:
        raise UserError(f"{FIELD}: {path!r} takes {name!r} by position alone; arguments are given by name")
    there = None if columns is None else {*GIVEN, *columns}
    for name in found.required:
        if there is not None and name not in there:
            raise UserError(
                f"{FIELD}: {path!r} asks for {name!r}, which is no column of the data; there are "
                f"{', '.join(sorted(there))}"
            )


def verdict(value: Any) -> bool:
    """Checked result of a function: a bool of Python, numpy or torch; TypeError for anything else."""
    if isinstance(value, bool):
        return value
    if str(getattr(value, "dtype", "")).rpartition(".")[2] == "bool" and getattr(value, "shape", None) == ():
        return bool(value)
    raise TypeError(f"the function says {value!r} ({type(value).__name__}): True keeps the group, False leaves it out")


def _answer(connection: Connection, *message: Any) -> None:
    connection.send_bytes(dumps(message).encode())


if __name__ == "__main__":
    main()
