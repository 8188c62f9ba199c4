"""An environment tried before a run: what is found out by playing it alone and beside another episode."""

from __future__ import annotations

import pytest
from environment_hosts import MakeHosts, case

from rljob_worker.environments.check import Checked, check_environment
from rljob_worker.environments.load import Source
from rljob_worker.errors import UserError


def test_one_that_repeats_itself_passes(make_hosts: MakeHosts) -> None:
    checked = check_environment(
        lambda: make_hosts(Source(name="FrozenLake", args={"slippery": True, "form": "Answer"}))
    )
    assert checked.repeats
    assert checked.examples == tuple(f"<answer>{name}</answer>" for name in ("Left", "Down", "Right", "Up"))


def test_one_that_does_not_is_told(make_hosts: MakeHosts) -> None:
    assert check_environment(lambda: make_hosts(case("Clock"))) == Checked(False, ())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Global",
            r"two episodes disturb each other: with seed 3 and the same actions, step 1 gives .* alone and .* It ",
        ),
        ("ClassCounter", r"two episodes disturb each other: .*step 1 gives .*observation='1'.* alone and "),
        ("Strict", r"seed 3, step 1: step: KeyError: 'rljob-42-answer'"),
        ("Numbers", r"seed 3, reset: reset: reset returned the observation 3 \(int\), which is no text"),
        ("Deaf", r"the pattern of its actions never matches: it does not take '<go>'"),
    ],
)
def test_what_would_go_wrong_in_a_run_is_named(make_hosts: MakeHosts, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        check_environment(lambda: make_hosts(case(name)))
    assert str(refused.value).startswith("environment")
