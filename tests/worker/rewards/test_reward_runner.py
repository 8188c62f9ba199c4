from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from reward_cases import Make, gone, make_spec, samples_of, scores, soon
from transformers import PreTrainedTokenizerBase

from rljob_worker.errors import UserError
from rljob_worker.rewards.match import Match
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rewards.score_calls import RewardError, RewardSample
from rljob_worker.rewards.scorers import Scorers
from rljob_worker.types import IntArray, Prompt

USER_MODULE = """
import asyncio, os, time

def count(response): return len(response.split())
def parts(prompt, response, label, level, *, bonus=0.0):
    return {"score": len(response) + bonus, "level": level, "same": prompt == label}
def everything(**kwargs):
    names = ("prompt", "response", "label", "level", "finish_reason")
    return {"score": 1, **{name: name in kwargs for name in names}}
def raises(response):
    if "b" in response: raise KeyError("no b please")
    return 1.0
def hangs(response):
    while "b" in response: pass
    return 1.0
def dies(response):
    if "b" in response: os._exit(3)
    return 1.0
class Silent(Exception):
    def __str__(self): raise RuntimeError("no text")
def odd(response):
    if "b" in response: raise BaseException("of its own")
    if "c" in response: raise Silent
    if "d" in response: raise ValueError("x" * 10**6)
    if "e" in response: raise KeyboardInterrupt
    if "f" in response: raise asyncio.CancelledError
    if "g" in response: raise ValueError("half \\ud800")
    if "h" in response:
        import shutil, tempfile
        os.chdir(tempfile.mkdtemp())
        shutil.rmtree(os.getcwd())
        exec("1/0")
    return 1.0
async def async_odd(response): return odd(response)
def forgets_async(response): return async_odd(response)
def yields(response): yield 1.0
def wrong(response):
    results = {"a": "text", "b": float("nan"), "c": None, "d": {"points": 1}, "e": {"score": 1, "note": "x"}}
    results |= {"f": 1e39, "g": {"score": 0, "loss": -1e39}, "h": 10**400}
    return results[response]
def large(response): return 1e30
def numpy_scalar(response):
    import numpy
    return numpy.float32(0.5)
def batch(samples, scale=1.0): return [scale * len(samples) + len(s["response"]) + s["level"] for s in samples]
def short_batch(samples): return [1.0]
def scalar_batch(samples):
    import json, numpy
    json.dumps = None
    return numpy.float64(1.0)
async def judge(response, gate):
    while not os.path.exists(gate): await asyncio.sleep(0.01)
    return 1.0 if response == "a" else 0.0
begun = 0
async def meets(response, wanted):
    global begun
    begun += 1
    while begun < wanted: await asyncio.sleep(0.01)
    return 1.0 if response == "a" else 0.0
async def waits(response):
    await asyncio.sleep(0.04 * len(response.split()))
    return len(response.split())
async def async_hangs(response):
    if "b" in response: await asyncio.sleep(1000)
    return 1.0
async def async_blocks(response):
    if "b" in response: time.sleep(1000)
    return 1.0
async def async_batch(samples): return [float(len(samples))] * len(samples)
def where(): return os.getpid()
def spawns(response):
    import subprocess, sys
    child = subprocess.Popen(["sleep", "1000"])
    with open("child.pid", "w") as file: file.write(str(child.pid))
    time.sleep(1000)
not_a_function = 3
"""


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "my_rewards_for_test.py").write_text(USER_MODULE)
    (folder / "broken_rewards_for_test.py").write_text("import no_such_package")
    return folder


# --- what a reward can be ----------------------------------------------------------------------


def test_builtin_rewards(make_runner: Make) -> None:
    assert scores(*make_runner(name="match"), ["a b", "a c", "b a", "a b c"]) == [1.0, 0.5, 0.0, 1.0]
    assert scores(*make_runner(name="exact"), ["a b", "a b c"]) == [1.0, 0.0]
    assert scores(*make_runner(name="format", args={"tags": ["b"]}), ["a b"]) == [0.0]
    assert scores(*make_runner(name="length"), ["a", "a a a a"]) == [-0.125, -0.5]
    assert scores(*make_runner(name="length", args={"limit": 4, "target": 2}), ["a", "a a"]) == [-0.25, 0.0]
    assert scores(*make_runner(name="overlong", args={"cache": 4}), ["a " * n for n in (4, 5, 8)]) == [0.0, -0.25, -1.0]
    assert scores(*make_runner(name="regex", args={"pattern": "a ."}), ["c a b", "a c", "b"]) == [1.0, 0.0, 0.0]


def test_math_in_its_processes(make_runner: Make) -> None:
    runner, spec = make_runner(name="math", timeoutSeconds=12)
    sample = samples_of(spec, ["a"], label="\\frac{1}{2}")[0]
    texts = ["0.5", "$\\frac{2}{4}$", "2", "\\boxed{9^{9^{9^{9}}}}"]
    results = runner.score(
        [RewardSample(sample.prompt, i, sample.generation, text) for i, text in enumerate(texts)], soon()
    )
    assert [r.score for r in results] == [1.0, 1.0, 0.0, 0.0]


def test_a_function_gets_what_it_names(make_runner: Make) -> None:
    runner, spec = make_runner("parts", args={"bonus": 0.5})
    (result,) = runner.score(samples_of(spec, ["a b c"]), soon())
    assert (result.score, result.parts, result.error) == (5.5, {"level": 7.0, "same": 0.0}, None)
    runner, spec = make_runner("everything")
    (result,) = runner.score(samples_of(spec, ["a"]), soon())
    assert set(result.parts.values()) == {1.0}
    assert len(result.parts) == 5


def test_numpy_scalars_are_numbers(make_runner: Make) -> None:
    assert scores(*make_runner("numpy_scalar"), ["a"]) == [0.5]


def test_a_batch_function_gets_a_group_at_once(make_runner: Make) -> None:
    runner, spec = make_runner("batch", batch=True, args={"scale": 10.0})
    both = samples_of(spec, ["a", "a b"], "data/0") + samples_of(spec, ["a"], "data/1")
    assert [r.score for r in runner.score(both, soon())] == [28.0, 30.0, 18.0]


def test_async_functions_run_together(make_runner: Make) -> None:
    # Each waits until all have begun.
    assert scores(*make_runner("meets", args={"wanted": 100}), ["a", "b"] * 50) == [1.0, 0.0] * 50
    assert scores(*make_runner("async_batch", batch=True), ["a", "b", "c"]) == [3.0] * 3


def test_several_rewards_in_one_job(workdir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    sources = [
        {"synthetic": {}, "name": "one"},
        {"synthetic": {}, "name": "two", "reward": {"python": "my_rewards_for_test:count"}},
    ]
    spec = make_spec({"name": "match"}, synthetic=None, sources=sources)
    other = spec.data.sources[1].reward
    assert other is not None
    first = samples_of(spec, ["a b"])
    second = [RewardSample(Prompt("two/0", "two", "q", (2,), "x", other), 0, first[0].generation)]
    with RewardRunner(Scorers(spec, tokenizer, workdir=workdir)) as runner:
        assert [r.score for r in runner.score(first + second + first, soon())] == [1.0, 2.0, 1.0]


def test_parts_are_added_up_and_recorded(workdir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    parts = [
        {"name": "match", "weight": 2.0},
        {"name": "regex", "args": {"pattern": "a", "compare": False}, "weight": -0.5, "recordAs": "has-a"},
        {"python": "my_rewards_for_test:batch", "batch": True, "weight": 0.0},
        {"python": "my_rewards_for_test:parts"},
    ]
    spec = make_spec({"parts": parts})
    with RewardRunner(Scorers(spec, tokenizer, workdir=workdir, processes=1)) as runner:
        results = runner.score(samples_of(spec, ["a c", "b"], "data/0") + samples_of(spec, ["a b"], "data/1"), soon())
    assert [r.parts for r in results] == [
        {"match": 0.5, "has-a": 1.0, "batch": 12.0, "parts": 3.0, "parts.level": 7.0, "parts.same": 0.0},
        {"match": 0.0, "has-a": 0.0, "batch": 10.0, "parts": 1.0, "parts.level": 7.0, "parts.same": 0.0},
        {"match": 1.0, "has-a": 1.0, "batch": 11.0, "parts": 3.0, "parts.level": 7.0, "parts.same": 0.0},
    ]
    assert [r.score for r in results] == [3.5, 1.0, 4.5]


def test_a_part_that_fails_fails_the_whole(workdir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    reward = {"parts": [{"name": "exact"}, {"python": "my_rewards_for_test:raises", "weight": 0.5}]}
    spec = make_spec(reward)
    with RewardRunner(Scorers(spec, tokenizer, workdir=workdir, processes=1)) as runner:
        with pytest.raises(RewardError, match="prompt data/0, sample 1 failed: raises: KeyError: 'no b please'"):
            runner.score(samples_of(spec, ["a", "a b"]), soon())
        assert scores(runner, spec, ["a"]) == [0.5]
    spec = make_spec(reward | {"onError": "Score", "errorScore": -3})
    with RewardRunner(Scorers(spec, tokenizer, workdir=workdir, processes=1)) as runner:
        good, bad = runner.score(samples_of(spec, ["a", "a b"]), soon())
    assert (good.score, good.parts) == (0.5, {"exact": 0.0, "raises": 1.0})
    assert (bad.score, bad.parts) == (-3, {})
    assert bad.error is not None
    assert bad.error.startswith("raises: KeyError")


def test_a_function_in_a_file(workdir: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """One that is called like a module of the standard library, and imports its neighbour."""
    (tmp_path / "helper_for_test.py").write_text("POINTS = 3.0")
    (tmp_path / "math.py").write_text(
        "from dataclasses import dataclass\nimport helper_for_test\n"
        "@dataclass\nclass Points:\n    value: float\n"
        "def score(response): return Points(helper_for_test.POINTS).value"
    )
    spec = make_spec({"python": f"{tmp_path}/math.py:score"})
    with RewardRunner(Scorers(spec, tokenizer, workdir=workdir, processes=1)) as runner:
        assert scores(runner, spec, ["a"]) == [3.0]
    for function, message in (
        (f"{tmp_path}/math.py:scroe", r"spec\.reward\.parts\[0\]\.python: .*has no 'scroe'; did you mean score\?"),
        (f"{tmp_path}/moth.py:score", r"spec\.reward\.parts\[0\]\.python: .*FileNotFoundError"),
    ):
        with pytest.raises(UserError, match=message):
            RewardRunner(Scorers(make_spec({"parts": [{"python": function}]}), tokenizer, workdir=workdir))


# --- order, overlap, cost ----------------------------------------------------------------------


def test_results_come_in_the_order_of_submission_and_overlap_with_other_work(make_runner: Make, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    runner, spec = make_runner("judge", args={"gate": str(gate)}, readPaths=[str(tmp_path)])
    for text in ["a", "b", "a"]:
        runner.submit(samples_of(spec, [text]))
    assert runner.outstanding == 3, "who submits waits for none"
    first = runner.take_busy_seconds()
    gate.touch()
    assert [r.score for _, r in runner.take_all(soon())] == [1.0, 0.0, 1.0]
    assert first > 0.0, "what is under way counts"
    assert runner.take_busy_seconds() > 0.0
    assert runner.take_busy_seconds() == 0.0
    assert runner.take_all(soon()) == []


def test_match_takes_a_label_apart_once(make_runner: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    taken_apart, tokenize = list[str](), Match._tokenize

    def counted(self: Match, label: str) -> list[IntArray]:
        taken_apart.append(label)
        return tokenize(self, label)

    monkeypatch.setattr(Match, "_tokenize", counted)
    # Ids are compared: no response becomes a text.
    monkeypatch.setattr("rljob_worker.rewards.runner.decode_responses", None)
    runner, spec = make_runner(name="match")
    label = "a b c d e f g h"
    for group in [samples_of(spec, [label] * 8, f"data/{i}", label=label) for i in range(32)]:
        runner.submit(group)
    assert [r.score for _, r in runner.take_all(soon())] == [1.0] * 256
    assert taken_apart == [label]


# --- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "KeyError: 'no b please' (.*my_rewards_for_test.py, line 11, in raises)"),
        ("hangs", "no result within reward.timeoutSeconds (1 s)"),
        ("dies", "the scoring process died with exit code 3"),
        ("async_hangs", "no result within reward.timeoutSeconds (1 s)"),
    ],
)
def test_a_failing_reward_names_the_sample_or_scores_it(make_runner: Make, function: str, message: str) -> None:
    """`raises` under both policies, which look at what is said of a failure and not at what it was."""
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    runner, spec = make_runner(function, timeoutSeconds=1, onError="Score", errorScore=-1.0)
    results = runner.score(samples_of(spec, ["a", "c", "a b", "a", "a"]), soon())
    assert [r.score for r in results] == [1.0, 1.0, -1.0, 1.0, 1.0]
    assert [r.error is None for r in results] == [True, True, False, True, True]
    assert re.match(pattern, str(results[2].error)), results[2].error
    assert scores(runner, spec, ["a", "c"]) == [1.0, 1.0]
    if function == "raises":
        runner, spec = make_runner(function, timeoutSeconds=1)
        with pytest.raises(RewardError, match=rf"the reward of prompt data/0, sample 2 failed: {pattern}"):
            runner.score(samples_of(spec, ["a", "c", "a b", "a"]), soon())
        assert scores(runner, spec, ["a", "c"]) == [1.0, 1.0]


@pytest.mark.parametrize("function", ["odd", "async_odd"])
def test_exceptions_of_any_kind_are_failures_of_their_samples(make_runner: Make, function: str) -> None:
    runner, spec = make_runner(function, onError="Score", errorScore=-1.0)
    results = runner.score(samples_of(spec, ["a", "b", "c", "d", "e", "f", "g", "h", "a"]), soon())
    assert [r.score for r in results] == [1.0, *[-1.0] * 7, 1.0]
    said = [str(result.error) for result in results[1:-1]]
    begins = ["BaseException: of its own (", "Silent: (its text fails: RuntimeError) (", "ValueError: xxx"]
    for text, start in zip(
        said,
        [*begins, "KeyboardInterrupt:  (", "CancelledError:  (", "ValueError: half \\ud800 (", "ZeroDivisionError: "],
        strict=True,
    ):
        assert text.startswith(start), text
        assert "my_rewards_for_test.py, line " in text or "(<string>, line 1" in text
        assert len(text) < 2500
        text.encode()


def test_what_would_have_to_be_awaited_or_iterated_is_named(make_runner: Make) -> None:
    for function, message in (("forgets_async", "async def"), ("yields", "return it in the place of yield")):
        runner, spec = make_runner(function, onError="Score", errorScore=-1.0)
        (result,) = runner.score(samples_of(spec, ["a"]), soon())
        assert (result.score, message in str(result.error)) == (-1.0, True), result.error


def test_an_async_reward_that_blocks_its_process_is_ended(make_runner: Make) -> None:
    runner, spec = make_runner("async_blocks", timeoutSeconds=1, onError="Score", errorScore=-1.0)
    results = runner.score(samples_of(spec, ["b"]), soon())
    assert [r.score for r in results] == [-1.0]
    assert scores(runner, spec, ["a"]) == [1.0]


def test_a_result_that_is_no_number_names_the_sample(make_runner: Make) -> None:
    runner, spec = make_runner("wrong")
    for response, message in {
        "a": r"the reward is str \('text'\), not a number",
        "b": "the reward is nan, not a finite number",
        "c": "the reward is NoneType",
        "d": "the returned dict has no 'score'; its keys are: 'points'",
        "e": r"part 'note' is str \('x'\), not a number",
        "f": r"the reward is 1e\+39, which is not finite in fp32: 3.4e\+38 at most",
        "g": r"part 'loss' is -1e\+39, which is not finite in fp32",
        "h": "the reward is 1000000000[0]*, not a finite number",
    }.items():
        with pytest.raises(RewardError, match=f"prompt data/0, sample 0 failed: ValueError: {message}"):
            runner.score(samples_of(spec, [response]), soon())


def test_a_weighted_sum_that_cannot_be_trained_on_names_the_sample(make_runner: Make) -> None:
    parts = [{"python": "my_rewards_for_test:large", "recordAs": name, "weight": 1e9} for name in ("one", "two")]
    runner, spec = make_runner(parts=parts)
    message = r"prompt data/0, sample 0 failed: the weighted sum of its parts is 2e\+39, which is not finite in fp32"
    with pytest.raises(RewardError, match=message):
        runner.score(samples_of(spec, ["a"]), soon())
    runner, spec = make_runner(parts=parts, onError="Score", errorScore=-3.0)
    (result,) = runner.score(samples_of(spec, ["a"]), soon())
    assert (result.score, result.error is None) == (-3.0, False)


def test_a_batch_of_the_wrong_size_is_an_error(make_runner: Make) -> None:
    runner, spec = make_runner("short_batch", batch=True)
    with pytest.raises(RewardError, match="sample 0 failed: ValueError: 1 score was returned for 2 samples"):
        runner.score(samples_of(spec, ["a", "b"]), soon())
    runner, spec = make_runner("scalar_batch", batch=True)
    with pytest.raises(RewardError, match="sample 0 failed: ValueError: a list of 2 scores is needed, not float64"):
        runner.score(samples_of(spec, ["a", "b"]), soon())


def test_a_label_that_cannot_be_matched_follows_the_policy(make_runner: Make) -> None:
    runner, spec = make_runner(name="match")
    with pytest.raises(RewardError, match="prompt data/0, sample 0 failed: ValueError: the label has no tokens"):
        runner.score(samples_of(spec, ["a"], label=" "), soon())
    runner, spec = make_runner(name="match", onError="Score", errorScore=0.25)
    (result,) = runner.score(samples_of(spec, ["a"], label=" "), soon())
    assert (result.score, result.error) == (0.25, "ValueError: the label has no tokens")


def test_a_catastrophic_regex_does_not_hang_the_job(make_runner: Make) -> None:
    runner, spec = make_runner(name="regex", args={"pattern": "(?:(?:a )+)+$"}, timeoutSeconds=1)
    with pytest.raises(RewardError, match=r"sample 1 failed: no result within reward\.timeoutSeconds"):
        runner.score(samples_of(spec, ["a", "a " * 40 + "b"]), soon())


def test_the_callers_deadline_holds(make_runner: Make, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    runner, spec = make_runner("judge", args={"gate": str(gate)}, readPaths=[str(tmp_path)])
    runner.submit(samples_of(spec, ["a", "a"]))
    with pytest.raises(RewardError, match=r"2 of 2 rewards had not ended at the deadline, .* prompt data/0, sample 0"):
        runner.take_all(soon(0.3))
    assert runner.take_all(soon()) == []
    gate.touch()
    assert scores(runner, spec, ["b"]) == [0.0]


def test_results_are_taken_as_they_come_each_with_its_sample(make_runner: Make) -> None:
    runner, spec = make_runner("waits")
    assert runner.take(0.01, 30) == []
    runner.submit(samples_of(spec, ["a " * 40, "a", "a a"]))
    assert runner.outstanding == 3
    taken, deadline = list[tuple[str, int, float]](), soon()
    while len(taken) < 4 and time.monotonic() < deadline:
        came = runner.take(0.5, 30)
        if not taken and came:
            runner.submit(samples_of(spec, ["a"], "data/1"))
        taken += [(sample.prompt.uid, sample.index, result.score) for sample, result in came]
    assert sorted(taken) == [("data/0", 0, 40.0), ("data/0", 1, 1.0), ("data/0", 2, 2.0), ("data/1", 0, 1.0)]
    assert taken[-1] == ("data/0", 0, 40.0), "the slow one is waited for by nobody"
    assert runner.outstanding == 0
    assert runner.take(0.01, 30) == []


def take_until_it_fails(runner: RewardRunner) -> None:
    for _ in range(1200):
        runner.take(0.05, 30.0)


def test_a_failure_of_one_that_is_taken_ends_all(make_runner: Make) -> None:
    runner, spec = make_runner("raises")
    runner.submit(samples_of(spec, ["a", "b"]))
    with pytest.raises(RewardError, match="no b please"):
        take_until_it_fails(runner)


def test_after_a_failure_the_next_round_is_clean(make_runner: Make) -> None:
    runner, spec = make_runner("raises")
    with pytest.raises(RewardError):
        runner.score(samples_of(spec, ["b"] + ["a"] * 200), soon())
    assert scores(runner, spec, ["a", "c"]) == [1.0, 1.0]
    # A call of the failed round may still be running; after it nothing counts as busy.
    runner.take_busy_seconds()
    deadline = soon(60)
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if runner.take_busy_seconds() == 0.0:
            return
    pytest.fail("the clock never stopped")


# --- refused before anything starts ------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            {"python": "no_module_for_test:f"},
            "spec.reward.python: 'no_module_for_test:f': module 'no_module_for_test' does not import: ModuleNotFound",
        ),
        (
            {"python": "broken_rewards_for_test:f"},
            "does not import: ModuleNotFoundError: No module named 'no_such_package'",
        ),
        ({"python": "my_rewards_for_test:conut"}, "has no 'conut'; did you mean count?"),
        ({"python": "my_rewards_for_test:not_a_function"}, "is not a function but int"),
        (
            {"python": "my_rewards_for_test:count", "args": {"respnse": 1}},
            "spec.reward.args: 'my_rewards_for_test:count' has no parameter 'respnse'; did you mean 'response'?",
        ),
        (
            {"python": "my_rewards_for_test:everything", "args": {"label": 1}},
            "spec.reward.args: 'label' is given to every reward function already",
        ),
        (
            {"python": "my_rewards_for_test:where", "batch": True},
            "with batch: true is called as f(samples, **args), which fails: too many positional",
        ),
        ({"name": "regex"}, "spec.reward.args.pattern: regex needs it"),
        ({"parts": [{"name": "exact"}, {"name": "overlong"}]}, "spec.reward.parts[1].args.cache: overlong needs it"),
        (None, "spec.data.reward: neither this source nor spec.reward"),
    ],
)
def test_a_wrong_reward_is_refused_at_construction(
    reward: dict[str, Any] | None, message: str, workdir: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(UserError) as caught:
        RewardRunner(Scorers(make_spec(reward), tokenizer, workdir=workdir))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["match", "exact", "math", "gsm8k"])
def test_a_reward_that_compares_needs_labels(name: str, workdir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match=rf"spec\.reward\.name: {name} compares with a label, .* labelKey is null"):
        RewardRunner(Scorers(make_spec({"name": name}, labelKey=None), tokenizer, workdir=workdir))


# --- processes ---------------------------------------------------------------------------------


def test_closing_ends_the_processes(make_runner: Make) -> None:
    runner, spec = make_runner("where")
    pids = {int(score) for score in scores(runner, spec, ["a"] * 50)}
    assert os.getpid() not in pids
    runner.close()
    assert all(gone(pid) for pid in pids)


def test_what_a_hung_reward_started_ends_with_it(make_runner: Make, workdir: Path) -> None:
    runner, spec = make_runner("spawns", timeoutSeconds=1, onError="Score")
    assert scores(runner, spec, ["a"]) == [0.0]
    assert gone(int((workdir / "child.pid").read_text()))


def test_a_scoring_process_imports_little_before_its_reward() -> None:
    """It is started for each that hangs or dies: the manifest's models would be most of its start."""
    program = "import sys, rljob_worker.rewards.worker; print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert not {"mpmath", "numpy", "pydantic", "torch", "yaml"} & set(told.stdout.split())


def test_a_hung_reward_does_not_outlive_a_killed_driver(workdir: Path) -> None:
    program = f"""
import os, signal, sys, threading, time
from pathlib import Path
from rljob_worker.confined.bounds import Bounds, environment
from rljob_worker.confined.access import files_of
from rljob_worker.rewards.pool import WorkerPool
from rljob_worker.confined.process import Place
from rljob_worker.rewards.worker import Setup
setup = Setup(None, "my_rewards_for_test:where", False, {{}}, 60.0)
workdir, variables = Path({str(workdir)!r}), environment({{}}, [])
files = files_of([workdir], [], [workdir], [], variables)
place = Place(workdir, variables, Bounds(2**31, files))
pool = WorkerPool(setup, processes=1, in_flight=1, grace=0.0, place=place)
sample = {{"prompt": "", "response": "b", "label": None, "finish_reason": "stop", "metadata": {{}}}}
done = threading.Event()
pool.submit([sample], lambda scores: (print(int(scores[0][0]), flush=True), done.set()))
done.wait(30)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == -9
    assert gone(int(ended.stdout))
