"""Environment of a forked process, and its end: as of one that was started."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from support.warm.client import WarmProcess
from support.warm.protocol import DRIVER, ENGINE, PLAIN, TRAINER, Request, with_variables

SCRIPT = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "beside": sys.path[0], "named": sys.path[1], "folder": os.getcwd(),
    "mark": os.environ["RLJOB_MARK"],
    "gone": "RLJOB_OTHER" in os.environ, "leads": os.getsid(0) == os.getpid(), "imported": "torch" in sys.modules,
}), flush=True)
print("to stderr", file=sys.stderr)
"""


def start(folder: Path, script: str, **variables: str) -> WarmProcess:
    (folder / "script.py").write_text(script)
    return WarmProcess(DRIVER, [str(folder / "script.py"), "one", "two"], {**os.environ, **variables})


def test_it_has_what_a_new_process_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(tmp_path / "named"), os.environ.get("PYTHONPATH", "")])
    assert start(tmp_path, SCRIPT, RLJOB_MARK="x", RLJOB_OTHER="y").communicate(120)[0]
    process = start(tmp_path, SCRIPT + "sys.exit(7)", RLJOB_MARK="a mark", PYTHONPATH=path)
    output, _ = process.communicate(60)
    first, second = output.splitlines()
    assert json.loads(first) == {
        "argv": [str(tmp_path / "script.py"), "one", "two"],
        "beside": str(tmp_path),
        "named": str(tmp_path / "named"),
        "folder": str(tmp_path),
        "mark": "a mark",
        "gone": False,
        "leads": True,
        "imported": True,
    }
    assert second == "to stderr"
    assert process.returncode == 7


def test_what_one_names_again_is_there_for_the_next(tmp_path: Path) -> None:
    """A test names all that it has itself, the standard library too; a job names nothing."""
    (tmp_path / "script.py").write_text("import colorsys, yaml, rljob_api")
    for path in (os.pathsep.join(filter(None, sys.path)), ""):
        process = WarmProcess(PLAIN, [str(tmp_path / "script.py")], {**os.environ, "PYTHONPATH": path})
        output, _ = process.communicate(120)
        assert process.returncode == 0, output


def test_a_signal_is_told_as_of_a_child(tmp_path: Path) -> None:
    process = start(tmp_path, "import time\ntime.sleep(60)")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM


def test_it_ends_with_whoever_asked_for_it(tmp_path: Path) -> None:
    process = start(tmp_path, "import time\ntime.sleep(60)")
    process._connection.close()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{process.pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


ENDING = """
import atexit, sys, threading
left = threading.Event()
atexit.register(print, "registered", end=" ")
threading.Thread(target=lambda: left.wait(60) and print("thread", end=" ")).start()
print("main", end=" ")
threading.Thread(target=lambda: threading.main_thread().join() or left.set()).start()
"""


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        ("", 0, ""),
        ("sys.exit(300)", 44, ""),
        ("sys.exit('a text')", 1, "a text\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_it_ends_as_python_does(tmp_path: Path, last: str, code: int, said: str) -> None:
    """Its threads have ended, what was registered was called, all that was written is there."""
    script, out, errors = tmp_path / "script.py", tmp_path / "out", tmp_path / "errors"
    script.write_text(ENDING + last)
    process = WarmProcess(PLAIN, [str(script)], {**os.environ}, out, errors)
    assert process.wait(120) == code, errors.read_text()
    assert out.read_text() == "main thread registered "
    assert errors.read_text().endswith(said)
    assert bool(said) == bool(errors.read_text())


def test_variables_that_are_read_once_are_those_of_its_parent() -> None:
    def key(role: str, **variables: str) -> str:
        return Request(role, [sys.executable], variables, "/").key

    assert key(ENGINE, OMP_NUM_THREADS="1", RLJOB_MARK="a") == key(ENGINE, RLJOB_MARK="b", OMP_NUM_THREADS="1")
    assert key(ENGINE, OMP_NUM_THREADS="1") != key(ENGINE, OMP_NUM_THREADS="2")
    assert key(ENGINE) != key(TRAINER)
    assert key(TRAINER, GLOO_SOCKET_IFNAME="lo", CUDA_DEVICE_MAX_CONNECTIONS="1") == key(TRAINER)


def test_variables_are_put_in_as_ray_does() -> None:
    assert with_variables({"A": "1"}, {"B": "$A:2", "C": "${B}:3"}) == {"A": "1", "B": "1:2", "C": "1:2:3"}
