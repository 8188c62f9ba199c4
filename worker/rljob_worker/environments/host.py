"""An environment host: `python -m rljob_worker.environments.host FD`, started and killed by `hosts.py`.

It holds environments by number, and does one thing after the other. The driver sends pickled tuples and is answered
in JSON: first its `Source`, answered by `["ready", {"examples": TEXTS, "schemas": of tools}]`, `["refused", what the
user can change]` or `["failed", text]`; then lists of `(task, number, call)`, of which each is answered before the
next is begun, so that the driver has a record of the one that a process was at:

* `Reset`: makes an environment; answered by `[task, "began", [observation, values, call]]`
* `Step`: `[task, "stepped", [observation, reward, terminated, truncated, values, the observation's messages, call]]`,
  where `call` is an agent's, `[stream, [[role, text], ...]]`, or null
* `Close`: `[task, "closed", null]`

or by `[task, "failed", text]`, after which the environment is closed, or by `[task, "gone", text]`, after which the
process ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

# By its name: a reward's own `json.dumps = ...` must not change what is answered.
from json import dumps
from multiprocessing.connection import Connection

from rljob_worker.confined.inside import adapt
from rljob_worker.confined.loading import out_of_reach, text_of
from rljob_worker.environments.base import (
    AgentCall,
    Call,
    CutAnswer,
    GoneError,
    Playable,
    Reset,
    Step,
    checked_began,
    checked_examples,
    checked_step,
)
from rljob_worker.environments.load import REACH, Make, Source, maker
from rljob_worker.errors import UserError

_LIBRARIES = (os.path.dirname(os.__file__), sys.prefix, "<frozen ")
"""Beginnings of files in which an error is raised that code of a user brought about."""


def main() -> None:
    """Serve until the driver closes the connection, then close what is open."""
    connection = Connection(int(sys.argv[1]))
    adapt()
    held, make = _Held(), None
    try:
        source: Source = connection.recv()
        try:
            make = maker(source)
            ready = {"examples": _examples(make), "schemas": getattr(make, "schemas", [])}
        except UserError as error:
            _answer(connection, "refused", str(error))
            return
        except BaseException as error:
            _answer(connection, "failed", _describe(error))
            return
        _answer(connection, "ready", ready)
        while True:
            tasks: list[tuple[int, int, Call]] = connection.recv()
            for task, number, call in tasks:
                try:
                    kind, value = held.do(make, call, number)
                except GoneError as error:
                    _answer(connection, task, "gone", str(error))
                    return
                except BaseException as error:
                    kind, value = "failed", f"{type(call).__name__.lower()}: {_describe(error)}"
                    held.forget(number)
                _answer(connection, task, kind, value)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    finally:
        held.close()
        with contextlib.suppress(Exception, SystemExit):
            _close(make)


class _Held:
    """The environments of this process."""

    def __init__(self) -> None:
        self._open: dict[int, Playable] = {}

    def do(self, make: Make, call: Call, number: int) -> tuple[str, object]:
        """Answer one call."""
        if isinstance(call, Reset):
            environment = self._open[number] = make()
            began = checked_began(environment.reset(seed=call.seed, options=call.options))
            return "began", [began.observation, began.values, _call(began.call)]
        if isinstance(call, Step):
            action = CutAnswer(call.action) if call.cut else call.action
            found = checked_step(self._open[number].step(action))
            flags = found.terminated, found.truncated
            return "stepped", [
                found.observation, found.reward, *flags, found.values, found.parts, _call(found.call),
            ]  # fmt: skip
        _close(self._open.pop(number))
        return "closed", None

    def forget(self, number: int) -> None:
        """Close one that failed; a second failure of it says nothing more."""
        with contextlib.suppress(Exception, SystemExit):
            _close(self._open.pop(number, None))

    def close(self) -> None:
        """Close all."""
        for number in list(self._open):
            self.forget(number)


def _call(call: AgentCall | None) -> list[object] | None:
    return None if call is None else [call.stream, call.messages]


def _close(environment: object) -> None:
    close = getattr(environment, "close", None)
    if callable(close):
        close()


def _examples(make: Make) -> list[str]:
    """Answers that the environment itself calls valid; most name none."""
    if isinstance(told := getattr(make, "examples", None), list):
        return told
    environment = make()
    try:
        given = getattr(environment, "examples", None)
        found = given() if callable(given) else given
        try:
            return checked_examples(found)
        except ValueError as error:
            raise UserError(f"environment: {error}") from None
    finally:
        # One that was never reset may not be ready for it.
        with contextlib.suppress(Exception, SystemExit):
            _close(environment)


def _answer(connection: Connection, *message: object) -> None:
    connection.send_bytes(dumps(message).encode())


def _describe(error: BaseException) -> str:
    """The exception and where the environment raised it."""
    frames = list(traceback.extract_tb(error.__traceback__))
    # What is raised here is about what came here, whatever library called it.
    frames = [] if frames and _is_ours(frames[-1].filename) else [f for f in frames if not _is_ours(f.filename)]
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES)] or frames
    place = f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
    text = text_of(error)
    said = text if isinstance(error, ValueError) and not frames else f"{type(error).__name__}: {text}"
    return f"{said}{place}{out_of_reach(error, REACH)}"


def _is_ours(filename: str) -> bool:
    return os.path.dirname(os.path.abspath(filename)) == os.path.dirname(os.path.abspath(__file__))


if __name__ == "__main__":
    main()
