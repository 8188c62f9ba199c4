"""The `code` reward, in a scoring process: the program of a response is run, and judged from outside.

A program gets inputs and gives outputs; what is expected of it is never in its process. Its exit code can only make it
fail, and what it prints or answers is compared here as text or plain values.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_api.rewards import SANDBOX_SHARE
from rljob_worker.confined.inside import connection_beside
from rljob_worker.rewards.code_tests import (
    CallCase,
    StdinCase,
    call_cases,
    column,
    program_of,
    same_output,
    same_value,
    stdin_cases,
    test_file,
)
from rljob_worker.sandbox.limits import OUTPUT_BYTES, Limits, SandboxError, SandboxSetup
from rljob_worker.sandbox.plain import unpack
from rljob_worker.sandbox.runs import Run, Sandbox, go_on

_TESTS_SECONDS = 20.0
"""Seconds for pytest itself, beside the program."""
_EXPECTED_ROOM = 65536


@dataclass(slots=True)
class Verdict:
    """Results of a response's tests: numbers of them, but for `no_code`."""

    cases: int = 0
    passed: int = 0
    wrong: int = 0
    raised: int = 0
    timed_out: int = 0
    over_limit: int = 0
    no_result: int = 0
    no_code: int = 0
    counts: tuple[str, ...] = field(
        default=("cases", "passed", "wrong", "raised", "timed_out", "over_limit", "no_result", "no_code"), repr=False
    )

    def score(self, share: bool) -> tuple[float, dict[str, float]]:
        """Score of at most 1, with the numbers beside it: the share of tests that passed, or whether all did."""
        passed = self.passed / self.cases if self.cases else 0.0
        return passed if share else float(passed == 1.0), {name: float(getattr(self, name)) for name in self.counts}

    def goes_on(self, share: bool) -> bool:
        """Whether another test is run: with all or nothing the first that fails is the last."""
        if self.no_result:
            # It would take as long again.
            return False
        return share or self.passed == self.passed + self.wrong + self.raised + self.timed_out + self.over_limit


class CodeReward:
    """Scores responses one at a time; a process of its own for each program.

    Args:
        args: of the reward.
        setup: the sandbox's.
        timeout: seconds that a call may take.

    Raises:
        SandboxError: no program can be run here.
    """

    def __init__(self, args: Mapping[str, Any], setup: SandboxSetup, timeout: float) -> None:
        self._kind, self._tests = str(args["kind"]), str(args["tests"])
        self._function, self._prefix = args.get("function"), args.get("prefix")
        self._extract, self._share = args.get("extract", "Fence"), args.get("score") == "Share"
        self._setup, self._allowed = setup, SANDBOX_SHARE * timeout
        if self._kind == "Pytest" and importlib.util.find_spec("pytest") is None:
            raise SandboxError("kind: Pytest needs pytest, which is not installed in the worker's environment")
        self._sandbox = Sandbox(tests=self._kind == "Pytest", requests=connection_beside() if setup.beside else None)
        self._try()

    def __call__(self, response: str, row: Mapping[str, object]) -> tuple[float, dict[str, float]]:
        """Score and parts of one response. Raises ValueError for tests in no known form, SandboxError."""
        deadline = time.monotonic() + self._allowed
        tests = column(row, self._tests)
        run: Callable[[str, Verdict, float], None]
        if self._kind == "Stdin":
            cases = stdin_cases(tests)
            run = lambda program, verdict, until: self._print(program, cases, verdict, until)  # noqa: E731
        elif self._kind == "Calls":
            calls = call_cases(tests, self._function)
            run = lambda program, verdict, until: self._call(program, calls, verdict, until)  # noqa: E731
        else:
            text = test_file(tests)
            run = lambda program, verdict, until: self._test(program, text, verdict, until)  # noqa: E731
        number = len(cases) if self._kind == "Stdin" else len(calls) if self._kind == "Calls" else 1
        verdict = Verdict(cases=number)
        program = program_of(response, self._extract)
        if program is None:
            verdict.no_code = 1
        else:
            before = "" if self._prefix is None else str(column(row, self._prefix))
            run(before + program, verdict, deadline)
        return verdict.score(self._share)

    def _try(self) -> None:
        verdict = Verdict(1)
        self._print("print(int(input()) + 1)", [StdinCase(b"41", "42")], verdict, time.monotonic() + 60)
        if not verdict.passed:
            raise SandboxError(f"a program that prints a number does not run: {verdict}")

    def _limits(self, seconds: float, output: int = 0) -> Limits:
        limits = Limits(self._setup.memory, int(seconds) + 2)
        return limits._replace(output_bytes=output_limit(output))

    def _print(self, program: str, cases: list[StdinCase], verdict: Verdict, deadline: float) -> None:
        what = {"kind": "script", "source": program}
        for case in cases:
            limits = self._limits(self._setup.seconds, len(case.expected))
            run = self._sandbox.begin(what, limits, case.given)
            in_time = _wait(run, functools.partial(_has_ended, run), self._setup.seconds, deadline)
            run.finish()
            if not in_time:
                _failed(run, verdict)
            elif run.status != 0:
                verdict.raised += 1
            elif same_output(run.printed.decode("utf-8", "backslashreplace"), case.expected):
                verdict.passed += 1
            else:
                verdict.wrong += 1
            if not verdict.goes_on(self._share):
                return

    def _call(self, program: str, cases: list[CallCase], verdict: Verdict, deadline: float) -> None:
        program_run: Run | None = None
        for case in cases:
            run = program_run or self._loaded(program, verdict, deadline)
            program_run = run
            if run is None:
                return
            run.send({"on": None, "name": case.function, "args": case.args, "kwargs": case.kwargs})
            if _wait(run, functools.partial(_has_answered, run), self._setup.seconds, deadline):
                compare(run.take(), case.expected, verdict)
            else:
                run.finish()
                _failed(run, verdict)
                program_run = None
            if not verdict.goes_on(self._share):
                break
        if program_run is not None:
            program_run.finish()

    def _loaded(self, program: str, verdict: Verdict, deadline: float) -> Run | None:
        """A process that has loaded the program; None where it does not, which is counted."""
        run = self._sandbox.begin({"kind": "calls", "source": program}, self._limits(self._allowed))
        if _wait(run, lambda: bool(run.lines), self._setup.seconds, deadline):
            if message_of(run.take()).get("names") is not None:
                return run
            verdict.raised += 1
            run.finish()
        else:
            run.finish()
            _failed(run, verdict)
        return None

    def _test(self, program: str, tests: str, verdict: Verdict, deadline: float) -> None:
        run = self._sandbox.begin({"kind": "calls", "source": program}, self._limits(self._allowed))
        try:
            if not _wait(run, lambda: bool(run.lines), self._setup.seconds, deadline):
                run.finish()
                _failed(run, verdict)
                return
            names = _names(message_of(run.take()))
            if names is None:
                verdict.raised += 1
                return
            self._test_loaded(run, {"kind": "tests", "source": tests, "names": names}, verdict, deadline)
        finally:
            run.finish()

    def _test_loaded(self, program: Run, what: dict[str, Any], verdict: Verdict, deadline: float) -> None:
        """Carry calls from the tests' process to the program's, and answers back, until the tests report."""
        tests = self._sandbox.begin(what, self._limits(self._allowed))
        until = min(deadline, time.monotonic() + self._setup.seconds + _TESTS_SECONDS)
        try:
            _confined(tests)
            while go_on([tests, program], lambda: bool(tests.lines), until):
                line = tests.take() or b""
                message = message_of(line)
                if "tests" in message:
                    _count(message, verdict)
                    return
                program.send_line(line)
                call_until = min(until, time.monotonic() + self._setup.seconds)
                if not go_on([tests, program], lambda: bool(program.lines), call_until):
                    break
                tests.send_line(program.take() or b"")
            if tests.status is not None:
                # It runs nothing of the program.
                raise ValueError(f"the tests' process ended without a report: {tests.last_error()}")
            program.finish()
            _failed(program, verdict)
        finally:
            tests.finish()


def output_limit(expected: int) -> int:
    """Bytes that a program may print, of which so many are expected."""
    return max(OUTPUT_BYTES, 2 * expected + _EXPECTED_ROOM)


def _has_ended(run: Run) -> bool:
    return run.status is not None


def _has_answered(run: Run) -> bool:
    return bool(run.lines)


def _wait(run: Run, reached: Callable[[], bool], seconds: float, deadline: float) -> bool:
    """Whether a program came to that within the seconds, from when it is confined on."""
    _confined(run)
    return run.until(reached, min(deadline, time.monotonic() + seconds))


def _confined(run: Run) -> None:
    if not run.confined and not run.until(lambda: run.confined, time.monotonic() + run.limits.starting_seconds):
        run.finish()


def _failed(run: Run, verdict: Verdict) -> None:
    """Count a test whose program did not end in time, or in its limits."""
    if run.over is not None:
        verdict.over_limit += 1
    elif run.out_of_time:
        verdict.timed_out += 1
    else:
        verdict.raised += 1


def message_of(line: bytes | str | None) -> dict[str, Any]:
    """Message of a process, which may be anything; empty for what is no message."""
    try:
        message = json.loads(line or "")
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _names(message: dict[str, Any]) -> dict[str, Any] | None:
    """Names of a program's module, that the tests' process gets."""
    names = message.get("names")
    if not isinstance(names, dict):
        return None
    return {name: kind for name, kind in names.items() if name.isidentifier() and _is_kind(kind)}


def _is_kind(kind: object) -> bool:
    """Whether it is one that `sandbox.testing` has: it came from the program's process."""
    return kind in ("call", "get") or (isinstance(kind, dict) and isinstance(kind.get("raises"), str))


def compare(line: bytes | str | None, expected: object, verdict: Verdict) -> None:
    """Count a test by what a call was answered."""
    message = message_of(line)
    if "value" not in message:
        verdict.raised += 1
        return
    try:
        same = same_value(unpack(message["value"]), expected)
    except (ValueError, TypeError, RecursionError):
        same = False
    verdict.passed += same
    verdict.wrong += not same


def _count(message: dict[str, Any], verdict: Verdict) -> None:
    """Count the tests by the report of the tests' process, which runs nothing of the program."""
    collected, passed, skipped = map(int, message["tests"])
    cases = collected - skipped
    if cases < 1:
        # They did not come so far as to be collected: the program failed when they were imported.
        verdict.raised += 1
        return
    verdict.cases, verdict.passed, verdict.wrong = cases, passed, cases - passed
