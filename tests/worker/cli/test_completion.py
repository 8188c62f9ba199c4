"""`rljob completion`: its script in a real bash."""

from __future__ import annotations

import shutil
import subprocess
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


@pytest.mark.parametrize("words", [("run", ""), ("run", "ex"), ("eval", "job.yaml", "--checkpoint", "")])
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


def test_a_zsh_can_read_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#compdef rljob\nautoload -Uz bashcompinit && bashcompinit\n_rljob() {")
    bash = shutil.which("bash")
    assert bash is not None
    (tmp_path / "script").write_text(text.split("\n", 2)[2])
    subprocess.run([bash, "-n", tmp_path / "script"], check=True, timeout=60)
