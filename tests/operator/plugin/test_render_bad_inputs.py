"""Whatever `kubectl rljob render` is given: a sentence with its place within two seconds, and no cluster is asked."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clocks import at_once
from support.hostile_texts import TEXTS

from rljob_operator.plugin import main as plugin

LONG = "x" * 300


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory; asking a cluster fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugin, "find_access", None)
    for name in ("pipe.yaml", "pipe"):
        os.mkfifo(name)
    silent = [os.open(name, os.O_RDWR) for name in ("pipe.yaml", "pipe")]
    Path("loop.yaml").symlink_to("loop.yaml")
    Path("folder.yaml").mkdir()
    Path("utf-16.yaml").write_bytes("a: é\n".encode("utf-16"))
    Path("large.yaml").touch()
    os.truncate("large.yaml", 11_000_000)
    Path("zero").symlink_to("/dev/zero")
    yield tmp_path
    for descriptor in silent:
        os.close(descriptor)


def refused(what: str, capsys: pytest.CaptureFixture[str]) -> str:
    with at_once():
        assert plugin.main(["render", what]) == 1
    out, err = capsys.readouterr()
    assert (out, "Traceback" in err) == ("", False)
    assert err.startswith("kubectl rljob: ")
    return err.removeprefix("kubectl rljob: ")


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_would_take_long_or_all_memory(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, message = TEXTS[name]
    Path("job.yaml").write_text(text + "\n")
    said = refused("job.yaml", capsys)
    assert said.startswith("job.yaml: ")
    assert f"\n  {message}" in said


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("pipe.yaml", "is a pipe that was not written to its end within 1.5 s"),
        ("pipe", "is a pipe that was not written to its end within 1.5 s"),
        ("/dev/zero", "is neither a file nor a pipe"),
        ("zero", "is neither a file nor a pipe"),
        ("folder.yaml", "is a folder; allowed: a file with an RLJob"),
        ("loop.yaml", "cannot be read: Too many levels of symbolic links"),
        (f"./{LONG}", "cannot be read: File name too long"),
        (f"{LONG}.yaml", "cannot be read: File name too long"),
        ("large.yaml", "has more than 1 MiB, which is no manifest"),
        ("utf-16.yaml", "is UTF-16; a manifest is UTF-8 (convert it: iconv -f UTF-16 -t UTF-8)"),
    ],
)
def test_what_is_no_file_of_text(what: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(what, capsys)
    assert said.startswith(f"{Path(what)}: 1 problem\n")
    assert message in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: &a [*a]\n", "line 1, column 8: *a stands inside what it repeats"),
        (b"  a: b\n" * 1_500_000, "has more than 1 MiB, which is no manifest"),
        (b"a: \xed\xa0\x80\n", "standard input is not UTF-8"),
        (b"", "is empty; allowed: an RLJob"),
    ],
)
def test_standard_input(
    content: bytes, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    assert message in refused("-", capsys)


def test_names_of_jobs() -> None:
    """Too long for a file: it is asked for in the cluster, as is any name without a slash or a suffix."""
    assert not plugin.commands.is_file(LONG)
    assert not plugin.commands.is_file("qwen3")
    Path("qwen3").mkdir()
    assert not plugin.commands.is_file("qwen3"), "a run folder is often called as its job"
