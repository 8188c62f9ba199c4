"""The process of one tracker: `python -P -m rljob_worker.records.trackers.process NAME SECONDS`.

It reads lines of JSON from standard input, an opening first, and answers each on standard output; what the package
prints goes to standard error. Standard input's end is the driver's: the run is closed within SECONDS then, or left.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from typing import IO, Any

from rljob_worker.host.processes import hide_memory
from rljob_worker.records.trackers.tracker import Opening, Tracker

_MESSAGE_CHARACTERS = 500


def main(name: str, seconds: float) -> None:
    """Serve one tracker until the driver is done, or gone."""
    hide_memory()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    package = importlib.import_module(f"rljob_worker.records.trackers.{name}")
    tracker: Tracker = package.open_tracker(Opening.of_line(sys.stdin.readline()))
    _answer(answers, id=tracker.opened.id, place=tracker.opened.place)
    end = {"failed": True}
    for line in sys.stdin:
        message = json.loads(line)
        if "failed" in message:
            end = message
            break
        try:
            _pass_on(tracker, message)
            _answer(answers, done=True)
        except Exception as error:
            _answer(answers, failed=described(error))
    watch = threading.Timer(seconds, os.killpg, (0, signal.SIGKILL))
    watch.daemon = True
    watch.start()
    tracker.finish(end["failed"])
    _answer(answers, finished=True)
    # Packages leave threads and exit handlers that wait for the network.
    os._exit(0)


def _pass_on(tracker: Tracker, message: dict[str, Any]) -> None:
    if "scalars" in message:
        tracker.scalars(message["step"], message["time"], message["scalars"])
    else:
        tracker.samples(message["step"], message["samples"])


def _answer(answers: IO[str], **content: Any) -> None:
    """OSError of a driver that is gone is nobody's matter: what it sent is still delivered."""
    try:
        answers.write(json.dumps(content) + "\n")
    except BrokenPipeError:
        return


def described(error: BaseException) -> str:
    """One line of an error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_MESSAGE_CHARACTERS]


if __name__ == "__main__":
    try:
        main(sys.argv[1], float(sys.argv[2]))
    except Exception as error:
        # The last line of the log is what the driver repeats.
        print(described(error), file=sys.stderr, flush=True)
        os._exit(1)
