"""The `code` reward whose programs run on servers of their own (`sandbox.isolation: Service`), in a scoring process."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Mapping
from typing import Any

from rljob_worker.errors import AwayError, UserError
from rljob_worker.rewards.code import Verdict, compare, message_of, output_limit
from rljob_worker.rewards.code_tests import (
    CallCase,
    StdinCase,
    call_cases,
    column,
    program_of,
    same_output,
    stdin_cases,
)
from rljob_worker.sandbox import remote_call
from rljob_worker.sandbox.limits import SandboxError, SandboxSetup
from rljob_worker.sandbox.service import Clock, Ran, Service

_TRIAL_SECONDS = 20.0
"""Seconds that a trial's programs may run, and as many that they may wait: together less than importSeconds."""
_TRIED = "def f(n):\n    return [n + 1, (n,)]\n"


class ServiceCodeReward:
    """Scores responses, several at once: a request for each test.

    Args:
        args: of the reward.
        setup: the sandbox's.
    """

    def __init__(self, args: Mapping[str, Any], setup: SandboxSetup) -> None:
        assert setup.service is not None
        self._args = args
        self._kind, self._tests = str(args["kind"]), str(args["tests"])
        self._function, self._prefix = args.get("function"), args.get("prefix")
        self._extract, self._share = args.get("extract", "Fence"), args.get("score") == "Share"
        self._seconds, self._setup = setup.seconds, setup.service
        self._service = Service(setup.service)

    async def check(self) -> None:
        """Run a program.

        Raises:
            AwayError: no server gives an answer.
            UserError: they do not run Python as it is needed.
        """
        patient = self._setup._replace(wait_seconds=_TRIAL_SECONDS)
        trial = ServiceCodeReward(self._args, SandboxSetup(0, _TRIAL_SECONDS, service=patient))
        verdict, clock = Verdict(2), Clock(_TRIAL_SECONDS, _TRIAL_SECONDS)
        try:
            await trial._print("print(int(input()) + 1)", [StdinCase(b"41", "42")], verdict, clock)
            await trial._call(_TRIED, [CallCase("f", [41], {"dict": []}, [42, [41]])], verdict, clock)
        except SandboxError as error:
            raise AwayError(f"reward.name: code: {error}") from error
        finally:
            await trial._service.close()
        if verdict.passed < verdict.cases:
            raise UserError(
                f"reward.name: code: sandbox.service.urls: a program that adds 1 does not run there ({verdict}); the "
                "servers need Python 3.10 or later as their language python"
            )

    async def __call__(self, response: str, row: Mapping[str, object]) -> tuple[float, dict[str, float]]:
        """Score and parts of one response. Raises ValueError for tests in no known form, SandboxError."""
        tests, clock = column(row, self._tests), self._clock()
        calls = self._kind == "Calls"
        cases = call_cases(tests, self._function) if calls else stdin_cases(tests)
        verdict = Verdict(cases=len(cases))
        program = program_of(response, self._extract)
        if program is None:
            verdict.no_code = 1
            return verdict.score(self._share)
        before = "" if self._prefix is None else str(column(row, self._prefix))
        program = before + program
        run: Any = self._call if calls else self._print
        if program.isascii() or _is_text(program):
            await run(program, cases, verdict, clock)
        else:
            # No source that could be sent; Python takes none of it either.
            verdict.raised = 1
        return verdict.score(self._share)

    def _clock(self) -> Clock:
        return Clock(self._setup.program_seconds, self._setup.wait_seconds)

    async def _print(self, program: str, cases: list[StdinCase], verdict: Verdict, clock: Clock) -> None:
        for case in cases:
            limit = output_limit(len(case.expected))
            ran = await self._run(program, case.given.decode("utf-8", "surrogateescape"), limit, clock, verdict)
            if ran is not None:
                if not ran.in_time:
                    verdict.timed_out += 1
                elif ran.exit_code != 0:
                    verdict.raised += 1
                elif same_output(ran.printed, case.expected):
                    verdict.passed += 1
                else:
                    verdict.wrong += 1
            if not verdict.goes_on(self._share):
                return

    async def _call(self, program: str, cases: list[CallCase], verdict: Verdict, clock: Clock) -> None:
        for case in cases:
            # Nobody else's lines are answers, though all that a forged one could say is a value.
            nonce = secrets.token_hex(16)
            request = {"on": None, "name": case.function, "args": case.args, "kwargs": case.kwargs}
            task = {"nonce": nonce, "source": program, "requests": [request]}
            ran = await self._run(_script(), f"{json.dumps(task)}\n", output_limit(0), clock, verdict)
            if ran is not None:
                answers = remote_call.answers(ran.printed, nonce)
                if len(answers) > 1 and message_of(answers[0]).get("names") is not None:
                    compare(answers[1], case.expected, verdict)
                elif not ran.in_time:
                    verdict.timed_out += 1
                else:
                    verdict.raised += 1
            if not verdict.goes_on(self._share):
                return

    async def _run(self, source: str, given: str, limit: int, clock: Clock, verdict: Verdict) -> Ran | None:
        """End of a program, whose test counts as failed where it is None: its time or its output is over the limit, or
        no server survives it."""
        if clock.program_left <= 0:
            verdict.timed_out += 1
            return None
        seconds = min(self._seconds, clock.program_left)
        ran = await self._service.run(source, given, seconds, limit, clock)
        if ran.lost:
            verdict.no_result += 1
            return None
        if ran.over_output or len(ran.printed) > limit:
            verdict.over_limit += 1
            return None
        return ran


@functools.cache
def _script() -> str:
    return remote_call.script()


def _is_text(program: str) -> bool:
    try:
        program.encode()
    except UnicodeEncodeError:
        return False
    return True
