"""The reward `code`: programs that cheat, programs that are right, and what becomes of the sandbox."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
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
from support.samples import drawn
from transformers import PreTrainedTokenizerBase

from rljob_api.spec import SandboxSpec
from rljob_api.spec.sandbox import Isolation
from rljob_worker.confined.kernel import Kernel
from rljob_worker.errors import UserError
from rljob_worker.rewards.code_tests import call_cases, program_of, same_output, same_value
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rewards.score_calls import RewardSample
from rljob_worker.rewards.scorers import Scorers
from rljob_worker.sandbox import namespaces
from rljob_worker.sandbox.kernel import refuse
from rljob_worker.types import Generation, Prompt, RewardResult

Score = Callable[..., list[RewardResult]]


needs_bubblewrap = pytest.mark.skipif(bool(namespaces.problem()), reason="no bubblewrap, or no user namespaces")
RIGHT_ONES: dict[str, tuple[Callable[..., tuple[str, Any]], int]] = {
    "Calls": (right_calls, 120), "Stdin": (right_stdin, 60), "Pytest": (right_pytest, 20),
}  # fmt: skip
TIERS = [Isolation.PROCESS, pytest.param(Isolation.NAMESPACE, marks=needs_bubblewrap)]


@pytest.fixture(scope="module")
def score(tokenizer: PreTrainedTokenizerBase) -> Iterator[Score]:
    """Scores (response, tests) pairs by a kind of the reward and a tier, each by one runner."""
    runners: dict[str, tuple[RewardRunner, Any]] = {}

    def do(pairs: list[tuple[str, Any]], isolation: Isolation = Isolation.PROCESS, **args: Any) -> list[RewardResult]:
        key = f"{isolation} {args}"
        if key not in runners:
            reward = {"name": "code", "args": {"tests": "tests"} | args, "timeoutSeconds": 60}
            spec = make_spec(reward).model_copy(update={"sandbox": SandboxSpec(seconds=4, isolation=isolation)})
            runners[key] = RewardRunner(Scorers(spec, tokenizer, processes=2)), spec
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


@pytest.mark.parametrize("kind", drawn("cheats", list(TESTS)))
@pytest.mark.parametrize("isolation", TIERS)
def test_cheats_score_nothing_and_leave_the_sandbox_as_it_was(score: Score, isolation: Isolation, kind: str) -> None:
    main = MAIN if kind == "Stdin" else ""
    cheats = {name: text + main for name, text in CHEATS.items() if kind != "Stdin" or name not in PRINTS_RIGHT}
    cheats |= STDIN_ALONE if kind == "Stdin" else {}
    right = fenced(RIGHT + main)
    pairs = [(text, TESTS[kind]) for cheat in cheats.values() for text in (fenced(cheat), right)]
    results = score(pairs, isolation, kind=kind)
    assert len(results) == 2 * len(cheats)
    assert [name for name, result in zip(cheats, results[::2]) if result.score != 0] == []
    assert [(name, result) for name, result in zip(cheats, results[1::2]) if result.score != 1] == []
    # None of them is a failure of the reward: a policy cannot end the job.
    assert [result.error for result in results if result.error] == []


@pytest.mark.parametrize("isolation", TIERS)
def test_what_failed_is_counted(score: Score, isolation: Isolation) -> None:
    names = ["past the deadline", "endless output", "almost", "sys.exit", "thread bomb"]
    pairs = [(fenced(CHEATS[name]), TESTS["Calls"]) for name in names]
    parts = [result.parts for result in score(pairs, isolation, kind="Calls")]
    assert [next(k for k, v in part.items() if v and k != "cases") for part in parts] == [
        "timed_out", "over_limit", "wrong", "raised", "raised",
    ]  # fmt: skip
    (result,) = score([("no program", TESTS["Calls"])], isolation, kind="Calls")
    assert (result.score, result.parts["no_code"], result.parts["cases"]) == (0, 1, 1)


@pytest.mark.parametrize("kind", drawn("right programs", list(RIGHT_ONES)))
@pytest.mark.parametrize("isolation", TIERS)
def test_right_programs_score_one(score: Score, isolation: Isolation, kind: str) -> None:
    make, count = RIGHT_ONES[kind]
    random_ = random.Random(count)
    pairs = [make(number, random_) for number in range(count)]
    results = score([(fenced(program), tests) for program, tests in pairs], isolation, kind=kind)
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
        ({"inputs": "5\n", "outputs": "6\n", "fn_name": "f"}, "inputs of the tests is str: a list is needed"),
        ({"inputs": [[1]], "outputs": 1, "fn_name": "f"}, "outputs of the tests is int: a list is needed"),
        ({"inputs": [[1]], "outputs": [1]}, "no function is named"),
    ]:
        with pytest.raises(Exception, match=said):
            score([(fenced(RIGHT), tests)], kind="Calls")


@pytest.mark.parametrize("isolation", TIERS)
def test_nothing_of_it_is_left(score: Score, isolation: Isolation) -> None:
    score([(fenced(CHEATS["thread that outlives"]), TESTS["Calls"])], isolation, kind="Calls")
    ours = below(os.getpid())
    servers = {pid for pid, (_, line) in ours.items() if "fork_server" in line and "bwrap" not in line}
    assert servers
    # A fork has the command line of its parent.
    assert [line for parent, line in ours.values() if parent in servers and line == ours[parent][1]] == []


def below(root: int) -> dict[int, tuple[int, str]]:
    """Parent and command line of each process below one, which other tests' are not."""
    found = subprocess.run(["ps", "-eww", "-o", "pid=,ppid=,args="], capture_output=True, text=True).stdout
    rows = [line.split(maxsplit=2) for line in found.splitlines()]
    known = {int(row[0]): (int(row[1]), row[2]) for row in rows if len(row) == 3}
    inside = {root}
    while more := {pid for pid, (parent, _) in known.items() if parent in inside} - inside:
        inside |= more
    return {pid: known[pid] for pid in inside if pid in known}


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


def test_namespaces_that_a_machine_does_not_give_are_refused(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = make_spec({"name": "code", "args": {"kind": "Calls", "tests": "tests"}})
    spec = spec.model_copy(update={"sandbox": SandboxSpec(isolation=Isolation.NAMESPACE)})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"isolation: Namespace: .*no bwrap on PATH.*isolation: Process needs neither"):
        RewardRunner(Scorers(spec, tokenizer))
    (bwrap := tmp_path / "bwrap").write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1"
    )
    bwrap.chmod(0o755)
    with pytest.raises(UserError, match=r"isolation: Namespace: .*\(bwrap: No permissions to create new namespace\)"):
        RewardRunner(Scorers(spec, tokenizer))


@needs_bubblewrap
def test_a_folder_in_memory_is_bounded_and_each_program_has_its_own(score: Score) -> None:
    writes = "def square(n):\n    import os\n    found = os.listdir('.')\n    open('left', 'w').write('x')\n"
    program = (
        writes + "    return n * n if not found and os.getcwd() == os.path.expanduser('~') == '/rljob-program' else 0\n"
    )
    assert [r.score for r in score([(fenced(program), TESTS["Calls"])] * 3, Isolation.NAMESPACE, kind="Calls")] == [
        1
    ] * 3
    full = "def square(n):\n    for i in range({}):\n        open(str(i), 'wb').write(b'x' * {})\n    return n * n\n"
    pairs = [(fenced(full.format(*sizes)), TESTS["Calls"]) for sizes in [(9, 2**23), (7, 2**23), (1001, 0), (999, 0)]]
    results = score(pairs, Isolation.NAMESPACE, kind="Calls")
    assert [(result.score, result.parts["raised"]) for result in results] == [(0, 1), (1, 0), (0, 1), (1, 0)]


def test_columns_that_are_not_there_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    spec = make_spec({"name": "code", "args": {"kind": "Calls", "tests": "cases"}})
    with pytest.raises(UserError, match=r"spec\.reward\.args\.tests: 'cases' is no column of the data; there are a, b"):
        RewardRunner(Scorers(spec, tokenizer, columns={"spec.data": frozenset({"a", "b"})}))


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


@pytest.mark.parametrize("expected", [float("nan"), [1, float("nan")], {"a": float("nan")}, "NaN"])
def test_an_output_that_is_missing_is_no_test(expected: object) -> None:
    with pytest.raises(ValueError, match="an output is NaN, which tables have for a value that is missing"):
        call_cases({"inputs": ["1"], "outputs": [expected], "fn_name": "f"}, None)


def test_outputs_are_compared_but_for_white_space_at_ends() -> None:
    assert same_output("a b \nc\n\n", "a b\nc")
    assert not same_output(" a", "a")
    assert not same_output("a\n\nb", "a\nb")
