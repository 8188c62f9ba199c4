"""Actions that a reward which runs a model's output must not be capable of."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import psutil
import pytest
from reward_cases import Make, gone, make_spec, samples_of, scores, soon
from support.children import Children
from support.samples import drawn
from transformers import PreTrainedTokenizerBase

from rljob_worker.confined import landlock, messages
from rljob_worker.confined.bounds import network_can_be_closed
from rljob_worker.errors import UserError
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rewards.score_calls import RewardError
from rljob_worker.rewards.scorers import Scorers
from rljob_worker.rewards.signatures import Signature
from rljob_worker.rewards.worker import Calling

HOSTILE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

def sees(response):
    Path("seen.json").write_text(json.dumps(dict(os.environ)))
    return 1.0
def eats(response):
    held = []
    while "b" in response: held.append(bytearray(2**24))
    return 1.0
def shares_eating(response):
    for _ in range(4):
        if "b" in response and os.fork() == 0:
            held = bytearray(100 * 2**20)
            for i in range(0, len(held), 4096): held[i] = 1
            time.sleep(1000)
    time.sleep(1000 if "b" in response else 0)
    return 1.0
def forks(response):
    while "b" in response:
        if os.fork() == 0: time.sleep(1000)
    return 1.0
def opens(response):
    held = [open(os.devnull) for _ in range(5000)]
    return 1.0
def writes(response):
    with open("large", "wb") as file: file.truncate(2**31)
    return 1.0
def floods(response):
    print("y" * 2**22)
    sys.stdout.flush()
    return 1.0
def prints(response):
    print("a\\x1b[2J\\u202e 日本\\rrljob: Succeeded", flush=True)
    os.write(1, b"\\xff\\n")
    return 1.0
def says(response):
    print("scored", response)
    return 1.0
def leaves(response):
    program = "import os, time; os.setsid(); open('left.pid', 'w').write(str(os.getpid())); time.sleep(1000)"
    middle = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', %r], env={})"
    subprocess.run([sys.executable, "-c", middle % program])
    while not os.path.exists("left.pid") or not Path("left.pid").read_text(): time.sleep(0.01)
    if "b" in response: time.sleep(1000)
    return 1.0
def connects(response):
    import socket
    with socket.create_connection(("127.0.0.1", int(response)), timeout=5): return 1.0
def holds(response):
    held = [os.memfd_create("held") for _ in range(8 * ("b" in response))]
    for file in held:
        for _ in range(8): os.write(file, b"x" * 2**23)
    time.sleep(1000 * len(held))
    return 1.0
def fills(response):
    for i in range(8): Path(f"/dev/shm/fill-{i}").write_bytes(b"x" * 2**23)
def reads(response):
    return float(Path(response).read_text())
def shares(response):
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    queue, lock = multiprocessing.Queue(), multiprocessing.Lock()
    def child():
        with lock: queue.put(1)
    process = multiprocessing.Process(target=child)
    process.start()
    with multiprocessing.Manager() as manager, ProcessPoolExecutor(2) as pool:
        shared = manager.list([queue.get(timeout=20)])
        return float(sum(shared) + sum(pool.map(abs, [-1, -2])))
def lies(response):
    import gc
    from multiprocessing.connection import Connection
    mine = next(o for o in gc.get_objects() if isinstance(o, Connection))
    class Evil:
        def __reduce__(self): return os.system, ("touch owned",)
    if response == "a": mine.send((1, "scores", Evil()))
    if response == "b": os.write(mine.fileno(), b"\\x00\\x10\\x00\\x00half a message")
    if response == "c": mine.send_bytes(b'[1, "scores", [[1e400, {}]]]')
    if response == "d": mine.send_bytes(b'[77, "scores", []]')
    if response == "e": os.write(mine.fileno(), b"\\x00\\x10\\x00\\x00")
    while response == "e":
        os.write(mine.fileno(), b" ")
        time.sleep(0.5)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile_rewards_for_test.py").write_text(HOSTILE)
    (folder / "leaving_rewards_for_test.py").write_text("import sys; sys.exit(0)")
    (folder / "vanishing_rewards_for_test.py").write_text("import os; os._exit(0)")
    (folder / "slow_rewards_for_test.py").write_text("raise KeyboardInterrupt")
    (folder / "sleeping_rewards_for_test.py").write_text("import time; time.sleep(300)")
    return folder


def hostile(make_runner: Make, function: str, **fields: Any) -> Any:
    return make_runner(None, python=f"hostile_rewards_for_test:{function}", **fields)


def test_a_reward_sees_no_secret_of_the_driver(
    make_runner: Make, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/tmp/token")
    monkeypatch.setenv("RLJOB_DRIVER_TOKEN", "secret")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("JUDGE_API_KEY", "given by name")
    runner, spec = hostile(make_runner, "sees", environment=["JUDGE_API_KEY", "RLJOB_DRIVER_TOKEN"])
    assert scores(runner, spec, ["a"]) == [1.0]
    seen = (workdir / "seen.json").read_text()
    assert "secret" not in seen
    assert "/tmp/token" not in seen
    assert "given by name" in seen
    assert '"PATH"' in seen


TOO_MUCH = {
    "eats": "MemoryError",
    "shares_eating": r"used more than 256 MiB \(reward.memory\)",
    "holds": r"used more than 256 MiB \(reward.memory\)",
    "forks": "it had started more than 64 processes",
}


@pytest.mark.parametrize("function", drawn("a reward that takes too much", list(TOO_MUCH), 2))
def test_a_reward_that_takes_too_much_is_ended_alone(make_runner: Make, children: Children, function: str) -> None:
    runner, spec = hostile(make_runner, function, memory="256Mi", timeoutSeconds=60)
    with pytest.raises(RewardError, match=TOO_MUCH[function]):
        runner.score(samples_of(spec, ["b"]), soon(60))
    assert scores(runner, spec, ["a"]) == [1.0]
    runner.close()
    assert not children(recursive=True)


@pytest.mark.parametrize(("function", "message"), [("opens", "Too many open files"), ("writes", "File too large")])
def test_files_are_bounded(make_runner: Make, function: str, message: str) -> None:
    runner, spec = hostile(make_runner, function)
    with pytest.raises(RewardError, match=message):
        runner.score(samples_of(spec, ["a"]), soon(30))


@pytest.mark.skipif(landlock.abi() == 0, reason="a kernel without Landlock")
def test_files_out_of_reach_are_told_with_the_fields_that_open_them(make_runner: Make, tmp_path: Path) -> None:
    runner, spec = hostile(make_runner, "fills")
    with pytest.raises(RewardError, match=r"PermissionError.*'/dev/shm/fill-0'.*reward\.readPaths.*reward\.writePaths"):
        runner.score(samples_of(spec, ["a"]), soon(30))
    assert not list(Path("/dev/shm").glob("fill-*"))
    (tmp_path / "data").write_text("0.5")
    for fields, result in (({"onError": "Score"}, 0.0), ({"readPaths": [str(tmp_path)]}, 0.5)):
        runner, spec = hostile(make_runner, "reads", **fields)
        samples = samples_of(spec, ["a"])
        (score,) = runner.score([replace(samples[0], text=str(tmp_path / "data"))], soon(30))
        assert score.score == result, score
    with pytest.raises(UserError, match=r"reward\.readPaths: /nowhere: there is no such file or folder"):
        hostile(make_runner, "reads", readPaths=["/nowhere"])


def test_multiprocessing_works_in_a_reward(make_runner: Make) -> None:
    runner, spec = hostile(make_runner, "shares")
    assert scores(runner, spec, ["a"]) == [4.0]


@pytest.mark.parametrize("function", ["checked", "of_the_pool"])
def test_an_import_that_does_not_end_is_named(
    function: str, workdir: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "'sleeping_rewards_for_test:f' has not been imported within reward.importSeconds (1 s)"
    spec = make_spec({"python": "sleeping_rewards_for_test:f", "importSeconds": 1})
    if function == "checked":
        with pytest.raises(UserError) as refused:
            RewardRunner(Scorers(spec, tokenizer, workdir=workdir))
        assert str(refused.value) == f"spec.reward.python: {message}"
        return
    # The second import may differ from the first: a file server that went away.
    monkeypatch.setattr(
        "rljob_worker.rewards.scorers.check_function", lambda *_: Calling(False, False, Signature.RLJOB)
    )
    with (
        RewardRunner(Scorers(spec, tokenizer, workdir=workdir, processes=1)) as runner,
        pytest.raises(RewardError) as failed,
    ):
        runner.score(samples_of(spec, ["a"]), soon(30))
    assert message in str(failed.value)


def test_what_it_prints_is_bounded(make_runner: Make, capfd: pytest.CaptureFixture[str]) -> None:
    runner, spec = hostile(make_runner, "floods")
    assert scores(runner, spec, ["a"] * 3) == [1.0] * 3
    runner.close()
    said = capfd.readouterr().err
    assert said.count("y") < 2 * 2**20 + 1000
    assert "reward: no more of what it prints is shown" in said


def test_what_it_prints_is_shown_and_not_obeyed(
    workdir: Path, tokenizer: PreTrainedTokenizerBase, children: Children, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = make_spec({"python": "hostile_rewards_for_test:prints"})
    runner = RewardRunner(Scorers(spec, tokenizer, workdir=workdir, processes=1))
    assert scores(runner, spec, ["a"]) == [1.0]
    # A keeper that is slow finds output and its order to end at once.
    (keeper,) = children()
    keeper.suspend()
    assert scores(runner, spec, ["a"]) == [1.0]
    Timer(0.3, keeper.resume).start()
    runner.close()
    lines = capfd.readouterr().err.splitlines()
    assert lines.count(r"reward | a\x1b[2J\u202e 日本\rrljob: Succeeded") == 2
    assert lines.count(r"reward | \xff") == 2


def test_what_it_prints_is_shown_while_it_goes_on(make_runner: Make, capfd: pytest.CaptureFixture[str]) -> None:
    runner, spec = hostile(make_runner, "says")
    assert scores(runner, spec, ["a"]) == [1.0]
    shown = ""
    deadline = time.monotonic() + 30
    while "reward | scored a" not in shown and time.monotonic() < deadline:
        shown += capfd.readouterr().err
        time.sleep(0.02)
    assert "reward | scored a" in shown
    assert scores(runner, spec, ["a"]) == [1.0], "the process is still there"


@pytest.mark.parametrize("response", ["a", "b"])
def test_a_grandchild_in_a_session_of_its_own_ends_with_it(make_runner: Make, workdir: Path, response: str) -> None:
    (workdir / "left.pid").unlink(missing_ok=True)
    # It starts two programs before it is late for the second response.
    seconds = 60 if response == "a" else 5
    runner, spec = hostile(make_runner, "leaves", timeoutSeconds=seconds, onError="Score")
    assert scores(runner, spec, [response]) == [1.0 if response == "a" else 0.0]
    left = int((workdir / "left.pid").read_text())
    if response == "a":
        assert psutil.pid_exists(left)
    runner.close()
    assert gone(left)


def test_a_closed_network(make_runner: Make) -> None:
    if not network_can_be_closed():
        with pytest.raises(UserError, match=r"spec\.reward\.network: false needs a network namespace"):
            hostile(make_runner, "connects", network=False)
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for network, result in ((True, [1.0]), (False, [0.0])):
            runner, spec = hostile(make_runner, "connects", network=network, onError="Score")
            samples = samples_of(spec, ["a"])
            found = runner.score([replace(samples[0], text=port)], soon(30))
            assert [score.score for score in found] == result, found


def test_a_refused_network_is_named(make_runner: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob_worker.rewards.scorers.network_can_be_closed", lambda: False)
    with pytest.raises(UserError, match=r"spec\.reward\.network: false needs a network namespace"):
        hostile(make_runner, "connects", network=False)


@pytest.mark.parametrize("response", drawn("a process that lies", ["a", "b", "c", "d"]))
def test_a_process_that_lies_to_the_driver_is_ended(make_runner: Make, workdir: Path, response: str) -> None:
    runner, spec = hostile(make_runner, "lies", timeoutSeconds=20, onError="Score")
    # Twenty, and what a busy machine takes to start another process.
    (score,) = runner.score(samples_of(spec, [response]), soon(180))
    assert score.score == 0.0
    assert not (workdir / "owned").exists()


def test_a_message_that_comes_byte_by_byte_ends_its_process(make_runner: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that takes 0.5 s for each byte keeps no deadline of other calls meanwhile."""
    monkeypatch.setattr(messages, "STALL_SECONDS", 2)
    runner, spec = hostile(make_runner, "lies", timeoutSeconds=120, onError="Score")
    begun = time.monotonic()
    (score,) = runner.score(samples_of(spec, ["e"]), soon(180))
    assert score.score == 0.0
    assert time.monotonic() - begun < 100


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("leaving", "module 'leaving_rewards_for_test' does not import: SystemExit: 0"),
        ("vanishing", "does not import: the scoring process died with exit code 0"),
        ("slow", "does not import: the scoring process died with exit code"),
    ],
)
def test_a_module_that_ends_its_process_is_refused(
    module: str, message: str, workdir: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(UserError) as caught:
        RewardRunner(Scorers(make_spec({"python": f"{module}_rewards_for_test:f"}), tokenizer, workdir=workdir))
    assert message in str(caught.value)
