"""The reward `code`: programs that cheat, programs that are right, and what becomes of the sandbox."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from code_cases import (
    CHEATS,
    MAIN,
    PRINTS_RIGHT,
    RIGHT,
    STDIN_ALONE,
    TESTS,
    fenced,
    right_calls,
    right_pytest,
    right_stdin,
)
from reward_cases import make_spec, soon
from transformers import PreTrainedTokenizerBase

from rljob_api.spec import SandboxSpec
from rljob_worker.confined.kernel import Kernel
from rljob_worker.errors import UserError
from rljob_worker.rewards.code_tests import program_of, same_output, same_value
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rewards.score_calls import RewardSample
from rljob_worker.sandbox.kernel import refuse
from rljob_worker.types import Generation, Prompt, RewardResult

Score = Callable[..., list[RewardResult]]


@pytest.fixture(scope="module")
def score(tokenizer: PreTrainedTokenizerBase) -> Iterator[Score]:
    """Scores (response, tests) pairs by a kind of the reward, all kinds by one runner each."""
    runners: dict[str, tuple[RewardRunner, Any]] = {}

    def do(pairs: list[tuple[str, Any]], **args: Any) -> list[RewardResult]:
        key = repr(args)
        if key not in runners:
            reward = {"name": "code", "args": {"tests": "tests"} | args, "timeoutSeconds": 60}
            spec = make_spec(reward).model_copy(update={"sandbox": SandboxSpec(seconds=4)})
            runners[key] = RewardRunner(spec, tokenizer, processes=2), spec
        runner, spec = runners[key]
        empty = Generation(np.zeros(0, np.int64), np.zeros(0, np.float32), "stop")
        samples = []
        for index, (response, tests) in enumerate(pairs):
            prompt = Prompt("data/0", "data", "question", (2,), None, spec.reward, row={"tests": tests, "p": "def f("})
            samples.append(RewardSample(prompt, index, empty, response))
        return runner.score(samples, soon(500))

    yield do
    for runner, _ in runners.values():
        runner.close()


@pytest.mark.parametrize("kind", ["Stdin", "Calls", "Pytest"])
def test_cheats_score_nothing_and_leave_the_sandbox_as_it_was(score: Score, kind: str) -> None:
    main = MAIN if kind == "Stdin" else ""
    cheats = {name: text + main for name, text in CHEATS.items() if kind != "Stdin" or name not in PRINTS_RIGHT}
    cheats |= STDIN_ALONE if kind == "Stdin" else {}
    right = fenced(RIGHT + main)
    results = score([(text, TESTS[kind]) for cheat in cheats.values() for text in (fenced(cheat), right)], kind=kind)
    assert len(results) == 2 * len(cheats)
    assert [name for name, result in zip(cheats, results[::2]) if result.score != 0] == []
    assert [(name, result) for name, result in zip(cheats, results[1::2]) if result.score != 1] == []
    # None of them is a failure of the reward: a policy cannot end the job.
    assert [result.error for result in results if result.error] == []


def test_what_failed_is_counted(score: Score) -> None:
    names = ["past the deadline", "endless output", "almost", "sys.exit", "thread bomb"]
    parts = [r.parts for r in score([(fenced(CHEATS[name]), TESTS["Calls"]) for name in names], kind="Calls")]
    assert [next(k for k, v in part.items() if v and k != "cases") for part in parts] == [
        "timed_out", "over_limit", "wrong", "raised", "raised",
    ]  # fmt: skip
    (result,) = score([("no program", TESTS["Calls"])], kind="Calls")
    assert (result.score, result.parts["no_code"], result.parts["cases"]) == (0, 1, 1)


@pytest.mark.parametrize(("kind", "make", "count"), [
    ("Calls", right_calls, 120), ("Stdin", right_stdin, 60), ("Pytest", right_pytest, 20),
])  # fmt: skip
def test_right_programs_score_one(score: Score, kind: str, make: Callable[..., tuple[str, Any]], count: int) -> None:
    random_ = random.Random(count)
    pairs = [make(number, random_) for number in range(count)]
    results = score([(fenced(program), tests) for program, tests in pairs], kind=kind)
    wrong = [(program, result) for (program, _), result in zip(pairs, results) if result.score != 1]
    assert wrong == []


def test_shares_prefixes_and_whole_responses(score: Score) -> None:
    tests = {"fn_name": "f", "inputs": [[1], [2], [3], [4]], "outputs": [1, 2, 0, 4]}
    same = [("a):\n    return a", tests)]
    whole = {"kind": "Calls", "prefix": "p", "extract": "Whole"}
    assert [score(same, **whole, score=how)[0].score for how in ("All", "Share")] == [0, 0.75]


def test_tests_that_are_none_fail_the_reward(score: Score) -> None:
    for tests, said in [
        ("[", "the tests is no JSON"),
        ([{"stdin": ""}], r"neither \[\{input, output\}"),
        ({"inputs": [[1]], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [[1]], "outputs": [1]}, "no function is named"),
    ]:
        with pytest.raises(Exception, match=said):
            score([(fenced(RIGHT), tests)], kind="Calls")


def test_nothing_of_it_is_left(score: Score) -> None:
    score([(fenced(CHEATS["thread that outlives"]), TESTS["Calls"])], kind="Calls")
    found = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout
    servers = {line.split()[0] for line in found.splitlines() if "fork_server" in line}
    forks = [line for line in found.splitlines() if "fork_server" in line and line.split()[1] in servers]
    assert forks == []


@pytest.mark.parametrize(
    ("kernel", "spec", "said"),
    [
        (Kernel(0, True), SandboxSpec(), "no Landlock .*requireFiles: false"),
        (Kernel(7, False), SandboxSpec(requireFiles=False), "no seccomp filters"),
        (Kernel(0, True), SandboxSpec(requireFiles=False), None),
        (Kernel(3, True), SandboxSpec(), None),
    ],
)
def test_a_sandbox_that_the_kernel_cannot_give_is_refused(kernel: Kernel, spec: SandboxSpec, said: str | None) -> None:
    if said is None:
        refuse(kernel, spec)
    else:
        with pytest.raises(UserError, match=said):
            refuse(kernel, spec)


def test_columns_that_are_not_there_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    spec = make_spec({"name": "code", "args": {"kind": "Calls", "tests": "cases"}})
    with pytest.raises(UserError, match=r"spec\.reward\.args\.tests: 'cases' is no column of the data; there are a, b"):
        RewardRunner(spec, tokenizer, columns={"spec.data": frozenset({"a", "b"})})


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```\n", "a\n"),
        ("```\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```json\nb\n```", "a\n"),
        ("```python\na\n", None),
        ("a", None),
        ("  ```Python\n  a\n  ```", "  a\n"),
        ("```python\na\n```\n```python\nb", "a\n"),
    ],
)
def test_the_last_closed_block_of_python_is_the_program(response: str, program: str | None) -> None:
    assert program_of(response, "Fence") == program
    assert program_of(response, "Whole") == response


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (1, 1.0, True), (0.1 + 0.2, 0.3, True), (1.001, 1, False), (True, 1, False), (None, None, True),
        (None, 0, False),
        ((1, [2]), [1, [2]], True), ({1: 2}, {"1": 2}, True), ("1", 1, False), (float("nan"), float("nan"), True),
        (float("inf"), 10**400, False), ([1], [1, 2], False), ({1}, [1], False), (10**400, 1.0, False),
    ],
)  # fmt: skip
def test_values_are_compared_by_what_they_are(got: Any, expected: Any, same: bool) -> None:
    assert same_value(got, expected) is same


def test_outputs_are_compared_but_for_white_space_at_ends() -> None:
    assert same_output("a b \nc\n\n", "a b\nc")
    assert not same_output(" a", "a")
    assert not same_output("a\n\nb", "a\nb")
