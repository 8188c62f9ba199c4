"""A job's function that leaves groups out: what it is given, what it may say, and the bounds of its process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reward_cases import make_spec
from test_run_folder import job
from transformers import PreTrainedTokenizerBase

from rljob_api.spec import RewardSpec
from rljob_worker.errors import StopRequested, UserError
from rljob_worker.flow import Group
from rljob_worker.rewards.group_filter import GroupFilter, group_filter_of
from rljob_worker.rewards.group_filter_process import verdict
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rewards.score_calls import RewardError
from rljob_worker.rewards.scorers import Scorers
from rljob_worker.rewards.source_check import check_sources
from rljob_worker.types import Prompt, RewardResult

FILTERS = """
import os, time
import numpy

def half(rewards, label):
    return sum(rewards) < len(rewards) / 2 and label == "a"
def hard(rewards, prompt, level=0, **more):
    assert prompt == "p" and more == {"label": "a", "tag": "t"}, more
    return numpy.bool_(level > 2)
def raises(rewards):
    raise ValueError(f"nothing of {rewards}")
def says(rewards):
    return 1
def sleeps(rewards):
    time.sleep(1000)
def ends(rewards):
    os._exit(7)
def eats(rewards):
    held = [bytearray(2**24) for _ in range(1000)]
async def later(rewards):
    return True
def by_place(rewards, /):
    return True
def of_another_column(rewards, colour):
    return True
constant = 3
"""
PROMPT = Prompt("row-7", "s", "p", (1, 2), "a", RewardSpec(name="match"), metadata={"level": 3, "tag": "t"})


def group(*rewards: float) -> Group:
    begun = Group.begun(0, PROMPT, len(rewards), 0, 0)
    return replace(begun, results=tuple(map(RewardResult, rewards)))


Make = Callable[..., GroupFilter]


@pytest.fixture
def make(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Make]:
    (tmp_path / "filters.py").write_text(FILTERS)
    made: list[GroupFilter] = []

    def make(function: str, **bounds: Any) -> GroupFilter:
        named = f"{tmp_path}/filters.py:{function}"
        spec = job(rollout={"oversampling": {"function": named}}, reward={"name": "exact", **bounds}).spec
        with RewardRunner(Scorers(make_spec({"name": "exact"}), tokenizer, workdir=tmp_path)) as runner:
            filter_ = group_filter_of(spec, runner, {"spec.data": frozenset({"level", "tag"})})
        assert filter_ is not None
        made.append(filter_)
        return filter_

    yield make
    for one in made:
        one.close()


def test_a_function_is_given_what_it_names_and_says_which_groups_stay(make: Make) -> None:
    half, stop = make("half"), threading.Event()
    assert [half.keeps(group(*rewards), PROMPT, stop) for rewards in ((0, 0), (1, 1), (0, 0.5))] == [True, False, True]
    assert make("hard").keeps(group(1, 1), PROMPT, stop) is True
    assert make("hard").keeps(group(1, 1), replace(PROMPT, metadata={"level": 1, "tag": "t"}), stop) is False


@pytest.mark.parametrize(
    ("function", "bounds", "said"),
    [
        ("raises", {}, "ValueError: nothing of [0.5, 1.0]"),
        ("says", {}, "the function says 1 (int): True keeps the group, False leaves it out"),
        ("sleeps", {"timeoutSeconds": 0.5}, "no answer within reward.timeoutSeconds (0.5 s)"),
        ("ends", {}, "the filter's process died with exit code 7"),
        ("eats", {"memory": "256Mi"}, "MemoryError"),
    ],
)
def test_a_function_that_does_not_say_so_fails_the_step_by_the_prompt(
    function: str, bounds: dict[str, Any], said: str, make: Make
) -> None:
    asked = make(function, **bounds)
    with pytest.raises(RewardError) as failed:
        asked.keeps(group(0.5, 1), PROMPT, threading.Event())
    text = str(failed.value)
    assert text.startswith("spec.rollout.oversampling.function: ")
    assert "on the group of prompt row-7: " in text
    assert said in text


def test_a_stopped_job_does_not_wait_for_the_function(make: Make) -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(StopRequested):
        make("sleeps").keeps(group(0, 1), PROMPT, stop)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("later", "is async; a plain def is called, one group after the other"),
        ("by_place", "takes 'rewards' by position alone"),
        ("of_another_column", "asks for 'colour', which is no column of the data; there are label, level, prompt, re"),
        ("constant", "is not a function but int"),
        ("halve", "has no 'halve'; did you mean half?"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_anything_starts(function: str, said: str, make: Make) -> None:
    with pytest.raises(UserError) as refused:
        make(function)
    assert str(refused.value).startswith("spec.rollout.oversampling.function: ")
    assert said in str(refused.value)


def test_validate_looks_for_the_function_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "filters.py").write_text(FILTERS)
    for name, said in (("filters.py:halve", "has no 'halve'; did you mean half"), ("none.py:half", "does not exist")):
        spec = job(rollout={"oversampling": {"function": f"{tmp_path}/{name}"}}).spec
        with pytest.raises(UserError, match=r"^spec\.rollout\.oversampling\.function: .*" + said):
            check_sources(spec)


def test_bools_of_numpy_and_torch_are_taken_and_nothing_else() -> None:
    import torch

    assert [verdict(value) for value in (True, np.bool_(False), torch.tensor(True))] == [True, False, True]
    for value in (1, 0.0, None, "yes", np.array([True]), torch.tensor([True])):
        with pytest.raises(TypeError, match="True keeps the group"):
            verdict(value)
