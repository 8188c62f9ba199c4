"""A scoring process: `python -m rljob_worker.rewards.worker FD`, started and killed by `pool.py`.

Rewards run here and not in the driver, because a hung function can only be ended together with its process. They run
in the main thread, where signals work. The driver sends pickled tuples and is answered in JSON: first its `Setup`,
answered by `["ready", [whether it is async, whether one call scores a group, its signature]]`, `["refused", what the
user can change]`, `["away", what does not answer now]` or `["failed", text]`; then
`(task, samples)`, answered by `[task, "scores", [[score, parts, note], ...]]` or `[task, "error" or "outage", text]`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

# By its name: a reward's own `json.dumps = ...` must not change what is answered.
from json import dumps
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from rljob_worker.confined.inside import adapt
from rljob_worker.confined.loading import out_of_reach, text_of
from rljob_worker.errors import AwayError, UserError
from rljob_worker.rewards.builtin import make_regex
from rljob_worker.rewards.functions import (
    REACH,
    RewardOutageError,
    Sample,
    Score,
    check_call,
    checked_batch,
    checked_score,
    flatten,
    load_function,
    make_caller,
)
from rljob_worker.rewards.parameters import is_async
from rljob_worker.rewards.signatures import (
    Call,
    Check,
    Signature,
    is_grouped,
    make_peer,
    signature_of_function,
)
from rljob_worker.rewards.slime_samples import provide_slime
from rljob_worker.sandbox.limits import SandboxError, SandboxSetup

if TYPE_CHECKING:
    from rljob_worker.rewards.judge import JudgeSetup

_HERE = os.path.dirname(os.path.abspath(__file__))
"""Asked for once: a reward may leave the process in a working directory that is gone."""
Message = tuple[int, list[Sample]]


@dataclass(frozen=True)
class Setup:
    """Settings of a scoring process."""

    name: str | None
    python: str | None
    batch: bool
    args: dict[str, Any]
    timeout_seconds: float
    import_seconds: float = 60.0
    columns: frozenset[str] | None = None
    """Columns of the rows, where they are to be checked against what the function asks for."""
    signature: str = "RLJob"
    keys: frozenset[str] = frozenset()
    """Columns of prompt and label, beside `columns`."""
    sandbox: SandboxSetup | None = None
    """Sandbox of the reward `code`."""
    judge: JudgeSetup | None = None
    """Set for the reward `judge`."""


def main() -> None:
    """Score until the driver closes the connection."""
    connection = Connection(int(sys.argv[1]))
    adapt()
    try:
        setup: Setup = connection.recv()
        try:
            score, how = _scorer(setup)
        except UserError as error:
            _answer(connection, "away" if isinstance(error, AwayError) else "refused", str(error))
            return
        except Exception:
            _answer(connection, "failed", traceback.format_exc())
            return
        _answer(connection, "ready", [how.asynchronous, how.grouped, how.signature])
        if how.asynchronous:
            asyncio.run(_serve_async(connection, score, setup.timeout_seconds))
        else:
            _serve(connection, score)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _answer(connection: Connection, *message: Any) -> None:
    connection.send_bytes(dumps(message).encode())


@dataclass(frozen=True)
class Calling:
    """Calling convention of a reward."""

    asynchronous: bool
    grouped: bool
    """Whether one call scores all samples of a prompt."""
    signature: Signature


def _scorer(setup: Setup) -> tuple[Callable[[list[Sample]], Any], Calling]:
    """A function from a task's samples to their scores, awaitable where it is asynchronous."""
    signature, grouped = Signature.RLJOB, setup.batch
    if setup.python is not None:
        if setup.signature in ("Auto", Signature.SLIME):
            provide_slime(setup.python)
        function = load_function(setup.python)
        signature = signature_of_function(function, setup.signature, setup.batch, setup.python)
        if signature is Signature.RLJOB:
            check_call(function, setup.python, setup.args, setup.batch, setup.columns)
        else:
            grouped = is_grouped(function, signature)
    elif setup.name == "math":
        # What it imports takes as long to start as the rest.
        from rljob_worker.rewards.math_reward import math

        function = math
    elif setup.sandbox is not None and setup.sandbox.service is not None:
        return _programs_elsewhere(setup), Calling(True, False, Signature.RLJOB)
    elif setup.name == "code":
        return _programs(setup), Calling(False, False, Signature.RLJOB)
    elif setup.judge is not None:
        return _judge(setup.judge), Calling(True, False, Signature.RLJOB)
    else:
        function = make_regex(**setup.args)
    asynchronous = is_async(function)
    call: Call
    check: Check
    if signature is not Signature.RLJOB:
        assert setup.python is not None
        call, check = make_peer(function, signature, setup.args, setup.python, _all_columns(setup))
    elif setup.batch:

        def call(samples: list[Sample]) -> Any:
            return function([flatten(sample) for sample in samples], **setup.args)

        def check(value: Any, samples: list[Sample]) -> list[Score]:
            return checked_batch(value, len(samples))
    else:
        call_one = make_caller(function, setup.args if setup.python is not None else {})

        def call(samples: list[Sample]) -> Any:
            return call_one(samples[0])

        def check(value: Any, samples: list[Sample]) -> list[Score]:
            return [checked_score(value)]

    async def score_async(samples: list[Sample]) -> list[Score]:
        return check(await call(samples), samples)

    def score(samples: list[Sample]) -> list[Score]:
        return check(call(samples), samples)

    return score_async if asynchronous else score, Calling(asynchronous, grouped, signature)


def _programs(setup: Setup) -> Callable[[list[Sample]], list[Score]]:
    """The reward `code`. UserError where no program can be run here."""
    from rljob_worker.rewards.code import CodeReward

    assert setup.sandbox is not None
    try:
        reward = CodeReward(setup.args, setup.sandbox, setup.timeout_seconds)
    except SandboxError as error:
        raise UserError(f"reward.name: code: {error}") from error

    def score(samples: list[Sample]) -> list[Score]:
        return [Score(*reward(sample["response"], sample["row"])) for sample in samples]

    return score


def _programs_elsewhere(setup: Setup) -> Callable[[list[Sample]], Awaitable[list[Score]]]:
    """The reward `code` with a service. UserError where that does not run programs."""
    from rljob_worker.rewards.code_service import ServiceCodeReward

    assert setup.sandbox is not None
    assert setup.sandbox.service is not None
    reward = ServiceCodeReward(setup.args, setup.sandbox)
    if setup.sandbox.service.tried:
        asyncio.run(reward.check())

    async def score(samples: list[Sample]) -> list[Score]:
        return [Score(*await reward(sample["response"], sample["row"])) for sample in samples]

    return score


def _judge(setup: JudgeSetup) -> Callable[[list[Sample]], Awaitable[list[Score]]]:
    """The reward `judge`. UserError where it cannot be asked."""
    from rljob_worker.rewards.judge import Judge

    judge = Judge(setup)
    if setup.tried:
        asyncio.run(judge.check())

    async def score(samples: list[Sample]) -> list[Score]:
        return [await judge.score(sample) for sample in samples]

    return score


def _all_columns(setup: Setup) -> frozenset[str] | None:
    """Columns that a function of another framework is given: prompt and label come under their own names."""
    return None if setup.columns is None else setup.columns | setup.keys


def _serve(connection: Connection, score: Callable[[list[Sample]], list[Score]]) -> None:
    while True:
        task, samples = connection.recv()
        try:
            answer: tuple[int, str, list[Score] | str] = (task, "scores", score(samples))
        except BaseException as error:
            answer = (task, *_failure(error))
        _answer(connection, *answer)


async def _serve_async(
    connection: Connection, score: Callable[[list[Sample]], Awaitable[list[Score]]], timeout: float
) -> None:
    """Runs all tasks that the driver sends at once, each with its own deadline."""
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[Message | None] = asyncio.Queue()
    closed = asyncio.Event()

    def read() -> None:
        message: Message | None
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                message = None
            loop.call_soon_threadsafe(inbox.put_nowait, message)
            if message is None:
                return

    async def run(task: int, samples: list[Sample]) -> None:
        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                answer: tuple[int, str, list[Score] | str] = (task, "scores", await score(samples))
        except BaseException as error:
            if closed.is_set():
                raise
            answer = (task, "error", timeout_message(timeout)) if deadline.expired() else (task, *_failure(error))
        _answer(connection, *answer)

    threading.Thread(target=read, daemon=True).start()
    running: set[asyncio.Task[None]] = set()
    while (message := await inbox.get()) is not None:
        runner = asyncio.create_task(run(*message))
        running.add(runner)
        runner.add_done_callback(running.discard)
    closed.set()


def timeout_message(seconds: float) -> str:
    """Error of a sample whose reward took too long."""
    return f"no result within reward.timeoutSeconds ({seconds:g} s)"


def _failure(error: BaseException) -> tuple[str, str]:
    if isinstance(error, RewardOutageError | SandboxError):
        return "outage", text_of(error)
    return "error", _describe(error)


def _describe(error: BaseException) -> str:
    """The exception and where the reward raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(f.filename)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {text_of(error)}{place}{out_of_reach(error, REACH)}"


def _is_ours(filename: str) -> bool:
    return os.path.dirname(filename) == _HERE


if __name__ == "__main__":
    main()
