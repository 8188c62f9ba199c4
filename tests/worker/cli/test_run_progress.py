from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from record_cases import write_run
from rich.console import Console

from rljob_api.metrics import REWARD_KEY
from rljob_api.wire.step_record import StepRecord
from rljob_worker.cli import progress
from rljob_worker.cli.progress import RunProgress


def shown(records: list[StepRecord], steps: int, terminal: bool, width: int = 200) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    with RunProgress(console, steps) as bar:
        bar.event("reading [model] and [/] data, a sentence that is longer than a terminal of eighty columns is wide")
        for record in records:
            bar.record(record)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def records(tmp_path: Path) -> list[StepRecord]:
    return write_run(tmp_path, 20)


def test_plain_output_is_one_line_every_few_seconds_and_the_last_step(
    records: list[StepRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    bar = RunProgress(console, 20)
    for record in records:
        bar.record(record)
        now += 1.0
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/20", "6/20", "11/20", "16/20", "20/20"]
    last = records[-1]
    assert re.fullmatch(
        rf"step 20/20  eta 0:00  reward {last.reward:.3f}  "
        rf"step {last.step_seconds * 1000:.0f} ms  rollout \d+ ms  actor_train \d+ ms  update_weights \d+ ms  .*",
        lines[-1],
    )


def test_events_are_printed_as_they_are(records: list[StepRecord]) -> None:
    for terminal in (True, False):
        text = shown(records, 20, terminal, width=80)
        assert (
            "rljob: reading [model] and [/] data, a sentence that is longer than a terminal of eighty columns" in text
        )
    assert "\x1b" not in text


def test_a_terminal_shows_one_live_line(records: list[StepRecord]) -> None:
    text = shown(records, 20, terminal=True)
    assert "20/20" in text
    assert "eta 0:00  reward" in text
    for width in (40, 80):
        screen = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", shown(records, 20, terminal=True, width=width))
        live = [part for part in re.split(r"[\r\n]", screen) if "eta" in part]
        assert live
        assert max(map(len, live)) <= width


def test_the_time_left_of_a_resumed_run_is_that_of_its_own_pace(records: list[StepRecord]) -> None:
    resumed = replace(records[-1], step=101, step_seconds=60.0)
    assert "eta 1:39:00" in shown([resumed], 200, terminal=False)


def test_an_evaluation_at_the_start_is_said_and_is_no_step(records: list[StepRecord]) -> None:
    at_start = replace(records[0], step=0, step_seconds=600.0, metrics={"eval/x": 0.25, REWARD_KEY: None})
    for terminal in (True, False):
        text = shown([at_start, replace(records[0], step_seconds=1.0)], 20, terminal)
        assert "rljob: evaluated before training in 600.0 s: eval/x 0.250\n" in text.replace("\r", "")
        assert "eta 0:19" in text, "of the pace of steps alone"


def test_a_step_without_a_reward_is_shown(records: list[StepRecord]) -> None:
    record = replace(records[0], metrics={REWARD_KEY: None})
    for terminal in (True, False):
        assert "reward -  step" in shown([record], 20, terminal)
