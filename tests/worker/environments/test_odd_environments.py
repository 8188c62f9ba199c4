"""Environments as clumsy and hostile ones are written: taken where they are right, or named where they are not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from environment_hosts import MakeHosts

from rljob_worker.confined import keeper
from rljob_worker.environments.base import (
    MAX_EXAMPLES,
    Answer,
    Began,
    EnvironmentFailure,
    Stepped,
    checked_examples,
)
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.environments.load import Source
from rljob_worker.errors import UserError


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, []), ([], []), (("up", "down"), ["up", "down"]), (range(3), ["0", "1", "2"]), ({"up": 1}, ["up"])],
)
def test_any_texts_are_taken(given: Iterable[object] | None, found: list[str]) -> None:
    assert checked_examples(given) == found


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("up", r"^examples is 'up' \(str\): a list of texts is needed"),
        (3, r"^examples is 3 \(int\): a list of texts is needed"),
        (["\ud800"], "no text: surrogates not allowed"),
        (itertools.repeat("up"), f"more than {MAX_EXAMPLES} texts"),
        (["x" * 2**21], "examples returned an observation of 2097152 bytes"),
    ],
)
def test_what_are_none_are_named(given: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        checked_examples(given)


ODD = """
import os, sys

class Fine:
    def reset(self, *, seed, options):
        return "begin", {}
    def step(self, action):
        return "on", 0.0, False, False, {}

class Letters(Fine):
    examples = "up"

class Static(Fine):
    @classmethod
    def reset(cls, seed, options):
        return "begin", {}
    @staticmethod
    def step(action):
        return "on", 0.0, True, False, {}

class StaticWithMore(Fine):
    @staticmethod
    def step(self, action):
        return "on", 0.0, True, False, {}

class Silent(BaseException):
    def __str__(self):
        raise RuntimeError("no")

class Unmade(Fine):
    def __init__(self):
        raise Silent

class Exits(Fine):
    def __init__(self):
        sys.exit(3)

class Interrupted(Fine):
    def __init__(self):
        raise KeyboardInterrupt("now")

class Ends(Fine):
    def step(self, action):
        os._exit(int(action))

class ClosesAll(Fine):
    def step(self, action):
        os.closerange(0, 100)
        return "on", 0.0, False, False, {}
"""


@pytest.fixture
def odd(tmp_path: Path) -> Callable[[str], Source]:
    (tmp_path / "odd.py").write_text(ODD)
    return lambda name: Source(python=f"{tmp_path}/odd.py:{name}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Letters", r"^environment: examples is 'up' \(str\): a list of texts is needed"),
        ("StaticWithMore", r"^environment.python: .* is called as step\(action\), which fails: missing a required"),
        (
            "Unmade",
            r"Unmade' cannot be made: Silent: \(its text fails: RuntimeError\) \(.*odd.py, line \d+, in __init__",
        ),
        ("Exits", r"Exits' cannot be made: SystemExit: 3 \(.*odd.py, line \d+, in __init__"),
        ("Interrupted", r"Interrupted' cannot be made: KeyboardInterrupt: now \(.*odd.py, line \d+, in __init__"),
    ],
)
def test_what_cannot_be_made_says_where_without_a_traceback(
    odd: Callable[[str], Source], make_hosts: MakeHosts, name: str, said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        make_hosts(odd(name)).start()
    assert "Traceback" not in str(caught.value)


def test_methods_may_need_no_object(odd: Callable[[str], Source], make_hosts: MakeHosts) -> None:
    hosts = make_hosts(odd("Static"))
    hosts.begin(0, 1)
    assert played(hosts) == Began("begin")
    hosts.step(0, "go")
    assert played(hosts) == Stepped("on", 0.0, True, False)


@pytest.mark.parametrize(
    ("name", "action", "said"),
    [
        ("Ends", "7", "the environment host died with exit code 7"),
        ("Ends", str(keeper.OVER_MEMORY), "the environment host died with an exit code of its own from 120 to 125"),
        ("Ends", str(keeper.NO_NETWORK_NAMESPACE), "the environment host died with an exit code of its own"),
        ("ClosesAll", "go", "such as Python's where its standard output was closed"),
    ],
)
def test_an_exit_code_is_not_taken_for_a_bound_that_was_exceeded(
    odd: Callable[[str], Source], make_hosts: MakeHosts, name: str, action: str, said: str
) -> None:
    hosts = make_hosts(odd(name), retries=0)
    hosts.begin(0, 1)
    played(hosts)
    hosts.step(0, action)
    failure = played(hosts)
    assert isinstance(failure, EnvironmentFailure)
    assert said in failure.text


def played(hosts: EnvironmentHosts) -> Answer:
    while not (found := hosts.take(1.0)):
        pass
    return found[0][1]


def test_the_line_of_a_users_file_is_named(tmp_path: Path, make_hosts: MakeHosts) -> None:
    """And not that of a library which raised the error."""
    (tmp_path / "asks.py").write_text(
        "import json\n\nclass Asks:\n    def reset(self, *, seed, options):\n        json.loads('{')\n"
        "    def step(self, action): ...\n"
    )
    hosts = make_hosts(Source(python=f"{tmp_path}/asks.py:Asks"))
    hosts.begin(0, 1)
    failure = played(hosts)
    assert isinstance(failure, EnvironmentFailure)
    assert failure.text.endswith(f"({tmp_path}/asks.py, line 5, in reset)")
    assert "JSONDecodeError: " in failure.text
