"""Scoring processes: confined processes that run a reward."""

from __future__ import annotations

from rljob_worker.confined.loading import whole_characters
from rljob_worker.confined.process import ConfinedProcess, Place
from rljob_worker.errors import AwayError, UserError
from rljob_worker.rewards.signatures import Signature
from rljob_worker.rewards.worker import Calling, Setup


def scoring_process(setup: Setup, place: Place) -> ConfinedProcess:
    """Start one."""
    return ConfinedProcess("rljob_worker.rewards.worker", setup, place, what="scoring process", field="reward")


def late_message(setup: Setup) -> str:
    """Message about a reward that is still being imported when it should have been."""
    what = setup.python or setup.name
    return f"{what!r} has not been imported within reward.importSeconds ({setup.import_seconds:g} s)"


def _field(setup: Setup) -> str:
    return "reward.name" if setup.python is None else "reward.python"


def check_function(setup: Setup, place: Place) -> Calling:
    """Start a reward in a process of its own, and try whether it takes its arguments; how it is called.

    Raises:
        UserError: it cannot be used, and why; AwayError where a server that it asks is away.
    """
    process = scoring_process(setup, place)
    try:
        late = not process.connection.poll(setup.import_seconds)
        answer = ["refused", f"{_field(setup)}: {late_message(setup)}"] if late else process.read()
    except (EOFError, OSError, ValueError):
        what = f"{setup.python or setup.name!r} does not {'start' if setup.python is None else 'import'}"
        raise UserError(f"{_field(setup)}: {what}: {process.end()}") from None
    finally:
        process.kill()
    if answer[0] != "ready":
        raise (AwayError if answer[0] == "away" else UserError)(whole_characters(str(answer[1])))
    how = list(answer[1])
    return Calling(bool(how[0]), bool(how[1]), Signature(how[2]))
