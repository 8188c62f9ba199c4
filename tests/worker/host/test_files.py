from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rljob_worker.host import files
from rljob_worker.host.files import AppendedFile, WriteFailures, cut_torn_line, replacing, write_whole


def test_a_reader_finds_the_old_or_the_new_content(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_whole(path, "old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    with contextlib.suppress(KeyboardInterrupt), replacing(path) as file:
        file.write(b"torn")
        raise KeyboardInterrupt
    assert path.read_text() == "new"
    write_whole(path, "caf\u00e9 \udcff")
    assert path.read_bytes() == "caf\u00e9 \\udcff".encode()
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix != files.TEMPORARY] == ["state.json"]


@pytest.mark.parametrize("durable", [True, False])
def test_durable_content_is_on_disk_before_it_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _: happened.append("sync"))
    real = Path.replace
    monkeypatch.setattr(Path, "replace", lambda s, t: (happened.append("replace"), real(s, t))[1])
    write_whole(tmp_path / "file", "content", durable=durable)
    assert happened == (["sync", "replace"] if durable else ["replace"])


def test_a_torn_last_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    cut_torn_line(path)
    for content, left in (("", ""), ("torn", ""), ("one\n", "one\n"), ("one\ntwo\nto", "one\ntwo\n")):
        path.write_text(content)
        cut_torn_line(path)
        assert path.read_text() == left


def test_threads_append_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's events come from the thread that trains, and from those that watch it."""
    really = os.write

    def slowly(descriptor: int, data: bytearray) -> int:
        with memoryview(data) as view:
            time.sleep(0.002)
            return really(descriptor, view)

    monkeypatch.setattr(os, "write", slowly)
    file = AppendedFile(tmp_path / "events.jsonl")
    lines = [f"{number:04d}\n" for number in range(100)]
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(file.append, line.encode()) for line in lines]:
            done.result(timeout=30)
    file.close()
    assert sorted((tmp_path / "events.jsonl").read_text().splitlines(keepends=True)) == lines


def test_what_could_not_be_written_is_counted_and_the_last_reason_kept(tmp_path: Path) -> None:
    failures = WriteFailures()
    for name in ("missing", "gone"):
        with failures.tolerated("trajectories", tmp_path / name):
            (tmp_path / name / "file").write_text("")
    assert failures.counts() == {"trajectories": 2}
    assert list(failures.messages()) == ["trajectories"]
    assert failures.messages()["trajectories"].startswith(f"{tmp_path}/gone/file: No such file or directory (")
