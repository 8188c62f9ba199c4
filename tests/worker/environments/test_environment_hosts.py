"""Environments in confined processes: deadlines, failures by class, and what is made anew after a loss."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from environment_hosts import MakeHosts, case
from support.children import Children

from rljob_worker.environments.base import Answer, Began, EnvironmentFailure, FailureKind, Reset, Step, Stepped
from rljob_worker.environments.episodes import EpisodeEnvironment
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.environments.load import Source, maker
from rljob_worker.errors import UserError


def taken(hosts: EnvironmentHosts) -> dict[int, Answer]:
    """All answers that are wanted."""
    found: dict[int, Answer] = {}
    while hosts.outstanding:
        found |= dict(hosts.take(60.0))
    return found


def texts(answers: dict[int, Answer]) -> dict[int, str]:
    return {key: one.text if isinstance(one, EnvironmentFailure) else one.observation for key, one in answers.items()}


def test_episodes_share_processes_and_answer_each_for_itself(
    make_hosts: MakeHosts, children: Children, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts = make_hosts(case("Counting", length=2, folder=str(tmp_path)), processes=2, per_process=3)
    for key in range(6):
        hosts.begin(key, 10 + key, {"row": 1} if key == 5 else None)
    with pytest.raises(ValueError, match="6 episodes are open, and 2 processes hold 3 each"):
        hosts.begin(6, 0)
    with pytest.raises(ValueError, match="there is an episode 5 already"):
        hosts.begin(5, 0)
    with pytest.raises(ValueError, match="its answer is still awaited"):
        hosts.step(0, "too early")
    began = taken(hosts)
    assert texts(began) == {key: f"seed {10 + key} {'[' + repr('row') + ']' if key == 5 else '[]'}" for key in range(6)}
    assert began[0] == Began("seed 10 []", {"size": 2.0})
    # Two keepers, each with a host.
    assert len(children(recursive=True)) == 4
    for key in range(6):
        hosts.step(key, "a")
    assert taken(hosts)[3] == Stepped("13: 1 a", 1.0, False, False, {"steps": 1.0})
    hosts.step(3, "b")
    hosts.end(4)
    last = taken(hosts)[3]
    assert isinstance(last, Stepped)
    assert last.done
    with pytest.raises(ValueError, match="it has ended"):
        hosts.step(3, "c")
    with pytest.raises(ValueError, match="there is no episode 4"):
        hosts.step(4, "c")
    hosts.begin(6, 20)
    assert texts(taken(hosts)) == {6: "seed 20 []"}
    assert (tmp_path / "closed-14").exists()
    hosts.close()
    assert sorted(path.name for path in tmp_path.glob("closed-*")) == [
        f"closed-{n}" for n in (10, 11, 12, 13, 14, 15, 20)
    ]
    assert not children(recursive=True)
    assert r"environment | \x1b[2Jstep of 13" in capfd.readouterr().err.splitlines()


WRONG = {
    "raise": "LookupError: no such door (",
    "exit": "SystemExit: 0 (",
    "number": "step returned the observation 7 (int), which is no text: a str is needed",
    "long": "step returned an observation of 1048577 bytes: 1048576 at most",
    "surrogate": "step returned an observation that is no text: surrogates not allowed",
    "nan": "the reward is nan, which is not finite in fp32",
    "text reward": "the reward is '1' (str), not a number",
    "flag": "terminated is 'no' (str): True or False is needed",
    "four": "step returned ('', 0.0, False, {}) (tuple), not (observation, reward, terminated, truncated, info)",
    "info": "step returned the info [1] (list): a dict is needed",
    "infinite": "info['x'] is inf, which is not finite in fp32",
    "many": "step returned 33 numbers in its info: 32 at most",
}


def test_what_an_environment_does_wrong_ends_its_episode_by_name(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts = make_hosts(case("Counting", folder=str(tmp_path)))
    for key, action in enumerate(WRONG):
        hosts.begin(key, key)
        taken(hosts)
        hosts.step(key, action)
        (failure,) = taken(hosts).values()
        assert isinstance(failure, EnvironmentFailure)
        assert failure.kind is FailureKind.DATA
        title = f"environment {case('Counting').title()}, seed {key}, step 1: step: "
        assert failure.text.startswith(title + WRONG[action]), failure.text
        assert (tmp_path / f"closed-{key}").exists()
    assert hosts.counts.failures == {FailureKind.DATA: len(WRONG), FailureKind.INFRA: 0, FailureKind.REPLAY: 0}
    assert hosts.counts.restarts == 0
    # The place is free, and the process goes on.
    hosts.begin(99, 1)
    assert texts(taken(hosts)) == {99: "seed 1 []"}


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("die", "the environment host died with exit code 7"),
        ("write", "the environment host was ended: it sent what is no answer ("),
        ("lie", "the environment host was ended: it sent what is no answer (task 0)"),
    ],
)
def test_a_host_that_dies_or_lies_is_replaced_and_its_neighbours_go_on(
    make_hosts: MakeHosts, action: str, said: str
) -> None:
    retries = int(action == "die")
    hosts = make_hosts(case("Counting"), retries=retries)
    for key in range(3):
        hosts.begin(key, key)
    taken(hosts)
    for key in (0, 2):
        hosts.step(key, "a")
    taken(hosts)
    for key, act in enumerate(("b", action, "b")):
        hosts.step(key, act)
    answers = taken(hosts)
    failure = answers.pop(1)
    assert isinstance(failure, EnvironmentFailure)
    assert failure.kind is FailureKind.INFRA
    assert f", seed 1, step 1: {said}" in failure.text
    assert texts(answers) == {0: "0: 2 b", 2: "2: 2 b"}
    assert hosts.counts.restarts == 1 + retries
    # Reset and step of at least the neighbour that had not been answered.
    assert hosts.counts.replayed >= 2
    assert hosts.counts.failures[FailureKind.INFRA] == 1


def test_many_steps_are_done_in_turn_whatever_they_weigh(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(case("Counting"), per_process=200)
    for key in range(200):
        hosts.begin(key, key)
    taken(hosts)
    # Answers of which a socket holds a few, while actions of which it holds one wait.
    actions = {key: "x" * (300_000 if key % 20 == 0 else 5_000 if key % 2 else 1) for key in range(200)}
    for key, action in actions.items():
        hosts.step(key, action)
    assert texts(taken(hosts)) == {key: f"{key}: 1 {action}" for key, action in actions.items()}
    assert hosts.counts.restarts == 0


def test_the_deadline_is_of_each_step_and_not_of_those_before_it(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(case("Counting"), step=2.5, retries=0)
    for key in range(4):
        hosts.begin(key, key)
    taken(hosts)
    for key, action in enumerate(("rest", "rest", "rest", "hang")):
        hosts.step(key, action)
    answers = taken(hosts)
    failed = [key for key, answer in answers.items() if isinstance(answer, EnvironmentFailure)]
    assert failed == [3]
    assert texts({key: answers[key] for key in range(3)}) == {key: f"{key}: 1 rest" for key in range(3)}
    assert hosts.counts.restarts == 1


def test_a_step_that_hangs_ends_its_host_and_is_made_anew(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts = make_hosts(case("DiesOnce", folder=str(tmp_path)), step=3.0)
    for key in range(2):
        hosts.begin(key, key)
    taken(hosts)
    for key, action in enumerate(("hang once", "b")):
        hosts.step(key, action)
    assert texts(taken(hosts)) == {0: "0: 1 hang once", 1: "1: 1 b"}
    assert hosts.counts.restarts == 1


def test_a_deadline_is_named(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(case("Counting"), step=1.0, reset=2.0, retries=0)
    hosts.start()
    hosts.begin(0, 0)
    taken(hosts)
    hosts.step(0, "hang")
    hosts.begin(1, 1, {"hang": True})
    said = texts(taken(hosts))
    assert said[0].endswith(
        "seed 0, step 1: step gave no answer within environment.stepSeconds (1 s), and its host was ended"
    )
    assert said[1].endswith(
        "seed 1, reset: reset gave no answer within environment.resetSeconds (2 s), and its host was ended"
    )
    assert hosts.counts.restarts == 2


def test_an_idle_host_that_was_killed_is_made_anew_when_it_is_needed(make_hosts: MakeHosts, children: Children) -> None:
    hosts = make_hosts(case("Counting"))
    hosts.begin(0, 4)
    taken(hosts)
    hosts.step(0, "a")
    taken(hosts)
    (keeper,) = children()
    keeper.children()[0].kill()
    keeper.wait(20)
    hosts.step(0, "b")
    assert texts(taken(hosts)) == {0: "4: 2 b"}
    assert (hosts.counts.restarts, hosts.counts.replayed) == (1, 2)


def test_an_environment_that_is_another_one_when_made_anew_is_named(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts = make_hosts(case("Forgets", folder=str(tmp_path)))
    for key in range(2):
        hosts.begin(key, key)
    taken(hosts)
    hosts.step(0, "die once")
    (failure,) = taken(hosts).values()
    assert isinstance(failure, EnvironmentFailure)
    assert failure.kind is FailureKind.REPLAY
    assert failure.text.endswith(
        "made anew with seed 0 and the same actions, its reset gave something else: observation 'another world', and "
        "'seed 0 []' before"
    )
    hosts.step(1, "a")
    assert texts(taken(hosts)) == {1: "1: 1 a"}


def test_what_is_not_deterministic_is_not_made_anew(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts = make_hosts(case("DiesOnce", folder=str(tmp_path)), deterministic=False)
    for key in range(2):
        hosts.begin(key, key)
    taken(hosts)
    hosts.step(0, "die once")
    assert hosts.holds(1)
    failures = taken(hosts)
    # The other one was asked for nothing.
    assert set(failures) == {0, 1}
    assert not hosts.holds(0)
    assert not hosts.holds(1)
    assert all(isinstance(one, EnvironmentFailure) and one.kind is FailureKind.INFRA for one in failures.values())
    assert "it is not deterministic, so that it cannot be made anew" in texts(failures)[1]
    assert hosts.outstanding == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (case("Missing"), "has no 'Missing'"),
        (case("function"), "is not a class but function"),
        (case("NoStep"), "has no method step: it needs reset and step"),
        (case("NoSeed"), r"is called as reset\(seed=..., options=...\), which fails: "),
        (case("NoAction"), r"is called as step\(action\), which fails: too many positional arguments"),
        (case("Async"), "step is async: it must be a plain method"),
        (case("Counting", size=3), r"environment.args: .* is made as Counting\(\*\*args\), which fails: .*'size'"),
        (Source(python="no_module_of_ours:Game"), "module 'no_module_of_ours' does not import: ModuleNotFoundError"),
        (Source(python="Game"), "is of neither form: package.module:Class, FILE.py:Class"),
        (Source(gymnasium={"id": "Frozen-v9"}), "environment.gymnasium: 'Frozen-v9' cannot be made: NameNotFound"),
        (Source(gymnasium={"idd": "x"}), "environment.gymnasium.idd: there is no such argument; there are id, kwargs"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(source: Source, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        maker(source)()
    assert str(refused.value).startswith("environment")


def test_what_cannot_be_used_is_refused_before_it_starts(
    make_hosts: MakeHosts, children: Children, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"^environment\.python: .*has no method step: it needs reset and step"):
        make_hosts(case("NoStep")).start()
    (tmp_path / "leaves.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(UserError, match=r"^environment: 'leaves\.py:Game' does not import: .* died with exit code 3"):
        make_hosts(Source(python="leaves.py:Game")).start()
    with pytest.raises(UserError, match=r"^environment\.python: gone\.py: there is no file "):
        make_hosts(Source(python="gone.py:Game"))
    assert not children(recursive=True)


def test_it_runs_confined(make_hosts: MakeHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Confined as a reward is: without the driver's variables, and without the files of the same user."""
    monkeypatch.setenv("RLJOB_TEST_SECRET", "a secret")
    secret = tmp_path.parent / f"{tmp_path.name}-secret"
    secret.write_text("text")
    (tmp_path / "spying.py").write_text(
        "import os\n"
        "class Spy:\n"
        "    def reset(self, *, seed, options):\n"
        "        return str('RLJOB_TEST_SECRET' in os.environ), {}\n"
        "    def step(self, action):\n"
        "        return open(action).read(), 0.0, False, False, {}\n"
    )
    hosts = make_hosts(Source(python="spying.py:Spy"))
    hosts.begin(0, 0)
    assert texts(taken(hosts)) == {0: "False"}
    hosts.step(0, str(tmp_path / "spying.py"))
    assert texts(taken(hosts))[0].startswith("import os")
    hosts.step(0, str(secret))
    said = texts(taken(hosts))[0]
    if os.path.exists("/sys/kernel/security") and "PermissionError" in said:
        assert "an environment reads its own folder, the working directory and Python packages" in said


def test_one_of_gymnasium_is_played_by_names(make_hosts: MakeHosts) -> None:
    settings: dict[str, Any] = {"kwargs": {"render_mode": "ansi", "desc": ["SF", "HG"], "is_slippery": False}}
    settings |= {"id": "FrozenLake-v1", "actions": {"Left": 0, "Down": 1, "Right": 2, "Up": 3}, "formatPenalty": -0.5}
    hosts = make_hosts(Source(gymnasium=settings))
    hosts.begin(0, 0)
    assert texts(taken(hosts)) == {0: "\n[S]F\nHG\n"}
    hosts.step(0, "hm")
    assert taken(hosts)[0] == Stepped("\n[S]F\nHG\n", -0.5, False, False, {"valid": 0.0})
    hosts.step(0, "Right")
    assert taken(hosts)[0] == Stepped("  (Right)\nS[F]\nHG\n", 0.0, False, False, {"prob": 1.0, "valid": 1.0})
    hosts.step(0, "Down")
    last = taken(hosts)[0]
    assert isinstance(last, Stepped)
    assert (last.reward, last.terminated) == (1.0, True)


# --- without a process -----------------------------------------------------------------------------


def test_an_episode_asks_again_for_what_it_had() -> None:
    episode = EpisodeEnvironment(0, 7)
    assert episode.waits
    assert episode.call() == Reset(7, {})
    assert episode.take(Began("b")) == Began("b")
    for action in ("x", "y"):
        episode.act(action)
        assert episode.call() == Step(action)
        assert episode.take(Stepped(action, 0.0, False, False)) is not None
    episode.act("z")
    episode.lost()
    asked: list[object] = []
    for answer in (Began("b"), *(Stepped(action, 0.0, False, False) for action in "xy")):
        asked.append(episode.call())
        assert episode.take(answer) is None
    assert asked == [Reset(7, {}), Step("x"), Step("y")]
    assert episode.call() == Step("z")
    end = Stepped("z", 1.0, True, False)
    assert episode.take(end) == end
    assert episode.done
    assert not episode.waits


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Stepped("x", 0.5, False, False), "reward 0.5, and 0.0 before"),
        (Stepped("x", 0.0, False, True), "truncated True, and False before"),
        (Stepped("x", 0.0, False, False, {"n": 1.0}), "values {'n': 1.0}, and {} before"),
    ],
)
def test_another_answer_than_before_is_a_failure(other: Stepped, said: str) -> None:
    episode = EpisodeEnvironment(0, 7)
    episode.take(Began("b"))
    episode.act("x")
    episode.take(Stepped("x", 0.0, False, False))
    episode.lost()
    episode.take(Began("b"))
    failure = episode.take(other)
    assert isinstance(failure, EnvironmentFailure)
    assert failure.text.endswith(f"step 1 ('x') gave something else: {said}")
