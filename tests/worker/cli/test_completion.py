"""`rljob completion`: its script in a real bash, and in a real zsh where there is one."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_worker.cli.completion import bash_script
from rljob_worker.cli.main import COMMANDS, main, parser

Completed = Callable[..., list[str]]


@pytest.fixture(scope="module")
def completed(tmp_path_factory: pytest.TempPathFactory) -> Completed:
    """Words that the Tab key offers after these ones, the last of which is begun."""
    script = tmp_path_factory.mktemp("completion") / "rljob"
    script.write_text(bash_script(parser()))

    def offered(*words: str) -> list[str]:
        program = (
            f'source {script}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _rljob; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        command = ["bash", "--norc", "-uc", program, "bash", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.stderr, done.returncode) == ("", 0)
        return done.stdout.split()

    return offered


def test_commands_options_and_values(completed: Completed) -> None:
    assert completed("rljob", "") == list(COMMANDS)
    assert completed("rljob", "re") == ["report", "replay"]
    assert "--sweep" in completed("rljob", "run", "--")
    assert completed("rljob", "eval", "job.yaml", "--check") == ["--checkpoint"]
    assert completed("rljob", "run", "job.yaml", "--only", "") == ["rollout", "train"]
    assert completed("rljob", "completion", "") == ["bash", "zsh"]
    assert completed("rljob", "import", "sl") == ["slime"]
    assert completed("rljob", "import", "trl", "job.sh", "--profile", "cp") == ["cpu"]


@pytest.mark.parametrize(
    "words",
    [("run", ""), ("run", "ex"), ("eval", "job.yaml", "--checkpoint", ""), ("import", "trl", "tr"), ("view", "")],
)
def test_files_are_left_to_the_shell(completed: Completed, words: tuple[str, ...]) -> None:
    assert completed("rljob", *words) == []


@pytest.mark.parametrize("word", ["$(touch owned)", "`touch owned`", "a;touch owned", "--$(touch owned)"])
def test_what_stands_in_the_line_is_not_run(
    completed: Completed, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ((word,), ("run", word), (word, word, ""), ("run", word, "--")):
        completed("rljob", *words)
    assert list(tmp_path.iterdir()) == []


def test_zsh_completes_at_the_first_tab(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("needs zsh (apt-get install zsh)")
    assert main(["completion", "zsh"]) == 0
    (tmp_path / "_rljob").write_text(capsys.readouterr().out)
    for name in ("own.yaml", "verl.sh"):
        (tmp_path / name).touch()
    setup = f"fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -D; cd {tmp_path}; PS1='ready''> '\n"
    typed = (
        ("rljob impo\t", "rljob import "),
        ("\x15rljob import tr\t", "import trl "),
        ("\x15rljob import verl ve\t", "import verl verl.sh"),
        ("\x15rljob validate o\t", "validate own.yaml"),
    )
    child, terminal = pty.fork()
    if child == 0:
        os.execve(zsh, [zsh, "-f"], {"TERM": "dumb", "PATH": os.environ["PATH"]})
    try:
        os.write(terminal, setup.encode())
        _read_until(terminal, "ready> ")
        for keys, shown in typed:
            os.write(terminal, keys.encode())
            _read_until(terminal, shown)
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def _read_until(terminal: int, shown: str) -> None:
    """Raises AssertionError with what stands on the terminal instead."""
    text, deadline = "", time.monotonic() + 60
    while shown not in text:
        assert select.select([terminal], [], [], max(0, deadline - time.monotonic()))[0], text
        text += os.read(terminal, 4096).decode()
