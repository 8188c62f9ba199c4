from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_cases import bare

from rljob_api.wire.step_record import StepRecord
from rljob_api.wire.values import finite
from rljob_worker.errors import JobError
from rljob_worker.records.steps import StepLog, effective_steps, read_steps


def test_records_are_numbered_and_read_back(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    odd = {"overlapped": {"reward": np.float32(0.5), "array": np.arange(2)}}
    written = [log.append(replace(bare(step), **odd)) for step in (1, 2)]
    assert [(r.index, r.rerun, r.overlapped) for r in written] == [
        (0, False, {"reward": 0.5, "array": [0, 1]}),
        (1, False, {"reward": 0.5, "array": [0, 1]}),
    ]
    assert read_steps(tmp_path) == log.records() == written
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert log.after(-1) == log.after(-7) == lines
    assert log.after(0) == lines[1:]
    assert log.after(99) == []


def test_a_torn_last_line_is_dropped_and_written_again(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    for step in (1, 2):
        log.append(bare(step, nested=["x" * 100]))
    log.close()
    whole = log.path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in (first, first + 1, len(whole) - 1):
        log.path.write_bytes(whole[:cut])
        again = StepLog(tmp_path)
        assert [r.step for r in again.records()] == [1]
        record = again.append(bare(2, nested=["x" * 100]))
        assert (record.index, record.rerun) == (1, False)
        again.close()
        assert log.path.read_bytes() == whole


def test_a_step_that_ran_before_the_restart_is_marked(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    for step in (1, 2, 3):
        log.append(bare(step))
    log.close()
    log = StepLog(tmp_path)
    assert [log.append(bare(step, 2)).rerun for step in (3, 4)] == [True, False]
    assert [log.has(step, attempt) for step, attempt in ((3, 1), (3, 2), (4, 1), (5, 2))] == [True, True, False, False]


@pytest.mark.parametrize("line", [b"{", b"3", b'{"index": 0}', b"\xff\xfe", b"\0\0"])
def test_a_broken_line_is_named(tmp_path: Path, line: bytes) -> None:
    StepLog(tmp_path).append(bare(1))
    with open(tmp_path / "steps.jsonl", "ab") as file:
        file.write(line + b"\n")
    with pytest.raises(JobError, match=r"steps\.jsonl:2: not a step record"):
        read_steps(tmp_path)


@pytest.mark.parametrize("line", [b"", b"{", b"3", b'{"index": 0}', b"\xff\xfe", b"\0\0", b"[" * 100000])
def test_a_broken_line_is_set_aside_and_the_run_goes_on(tmp_path: Path, line: bytes) -> None:
    log = StepLog(tmp_path)
    for step in (1, 2, 3):
        log.append(bare(step))
    log.close()
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(lines[0] + line + b"\n" + lines[2])
    again = StepLog(tmp_path)
    assert [(record.index, record.step) for record in again.records()] == [(0, 1), (1, 3)]
    assert again.append(bare(4, 2)).index == 2
    again.close()
    assert (tmp_path / "steps.jsonl.damaged").read_bytes() == line + b"\n"
    assert [(record.index, record.step) for record in read_steps(tmp_path)] == [(0, 1), (1, 3), (2, 4)]
    assert again.after(0) == log.path.read_text().splitlines()[1:]


def test_a_number_without_a_json_name_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        log.append(replace(bare(1), other=math.nan))
    assert (log.path.read_bytes(), len(log)) == (b"", 0)
    assert finite({"a": math.nan, "b": math.inf, "c": None, "d": 1.5}) == {"a": None, "b": None, "c": None, "d": 1.5}


def test_readers_see_whole_prefixes_while_the_driver_appends(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    wrong: list[object] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            steps = [json.loads(line)["step"] for line in log.after(4)]
            if steps != list(range(6, 6 + len(steps))):
                wrong.append(steps)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(1, 300):
        log.append(bare(step))
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert [record.index for record in log.records()] == list(range(299))


def test_what_was_appended_survives_kill_9(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from rljob_worker.records.steps import StepLog\n"
        "from record_cases import bare\n"
        "log = StepLog(Path(sys.argv[1]))\n"
        "for step in range(1, 51): log.append(bare(step, nested=['x' * 5000]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={"PYTHONPATH": path}, timeout=60)
    assert ended.returncode == -9
    assert [record.step for record in read_steps(tmp_path)] == list(range(1, 51))


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6)), min_size=1, max_size=6))
def test_effective_steps_are_those_the_last_weights_came_from(attempts: list[tuple[int, int]]) -> None:
    """Each attempt continues after a step that was reached before and runs some more."""
    records: list[StepRecord] = []
    alive: dict[int, int] = {}
    for start, count in attempts:
        start = min(start, max(alive, default=0))
        alive = {step: index for step, index in alive.items() if step <= start}
        for step in range(start + 1, start + count + 1):
            alive[step] = len(records)
            records.append(replace(bare(step), index=len(records)))
    assert [(r.step, r.index) for r in effective_steps(records)] == sorted(alive.items())


def test_a_shorter_second_attempt_makes_the_rest_of_the_first_obsolete() -> None:
    records = [bare(step, a) for a, steps in ((1, (1, 2, 3, 4)), (2, (3,))) for step in steps]
    assert [(r.step, r.attempt) for r in effective_steps(records)] == [(1, 1), (2, 1), (3, 2)]


def test_the_file_is_json_lines(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.append(bare(1, nested=["a\nb\u2028c"]))
    assert [json.loads(line)["nested"] for line in log.path.read_text().splitlines()] == [["a\nb\u2028c"]]
