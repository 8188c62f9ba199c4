"""A run folder that the code before the wire types wrote: the quickstart with 4 steps, cut to its first two."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_api.wire.run_status import SUMMARY_OF_SUCCESS, PhaseSummary, RunOutcome, RunSummary
from rljob_api.wire.step_record import StepRecord
from rljob_worker.checkpoints.state import DriverState
from rljob_worker.host.sealed_json import sealed
from rljob_worker.records.run_files import require_run_folder
from rljob_worker.records.steps import StepLog, effective_steps, read_steps
from rljob_worker.records.summary import summarize, write_summary
from rljob_worker.report.build import build_report

OLD = Path(__file__).parent / "old_run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(OLD, tmp_path / "run")


def test_records_are_read_and_would_be_written_to_the_same_bytes() -> None:
    lines = (OLD / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    records = read_steps(OLD)
    assert [(record.index, record.step, record.attempt, record.rerun) for record in records] == [
        (0, 1, 1, False),
        (1, 2, 1, False),
    ]
    assert [json.dumps(record.to_json()) for record in records] == lines
    assert all(record.weights is not None and record.weights.verified for record in records)
    assert records[0].memory_states()["trainer", "0", "resident"] > 2**20


def test_a_record_beside_a_checkpoint_is_read_and_written_after_them(folder: Path) -> None:
    state = DriverState(**json.loads((OLD / "driver.json").read_text(encoding="utf-8")))
    assert state.record is not None
    draft = StepRecord.parse_draft(state.record)
    assert json.dumps(draft.to_json()) == json.dumps(state.record)
    log = StepLog(folder)
    assert log.append(draft).index == 2
    assert log.after(1) == [(folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()[2]]
    assert [record.step for record in effective_steps(log.records())] == [1, 2, 4]


def test_the_report_is_drawn(folder: Path) -> None:
    page, png = build_report(folder)
    assert "2 of 4" in page.read_text(encoding="utf-8")
    assert png.stat().st_size > 10_000


def test_the_run_and_its_summary_are_read() -> None:
    run = require_run_folder(OLD)
    assert (run.name, run.attempt) == ("quickstart", 1)
    text = (OLD / "run.json").read_text(encoding="utf-8")
    assert json.dumps(run.to_json(), indent=1) == text


def test_a_summary_is_written_to_the_same_bytes(tmp_path: Path) -> None:
    """The summary is of four steps, of which the folder here keeps two: the values that follow from the records are
    left out."""
    text = (OLD / "summary.json").read_text(encoding="utf-8")
    content = json.loads(text)
    made = RunSummary(**{**content, "phases": [PhaseSummary(**row) for row in content["phases"]]})
    written = write_summary(tmp_path, made).read_text(encoding="utf-8")
    assert written == sealed(content, indent=1), "with a checksum"
    assert json.dumps(content, indent=1) == text
    assert SUMMARY_OF_SUCCESS in text
    assert SUMMARY_OF_SUCCESS not in json.dumps(replace(made, outcome=RunOutcome.STOPPED).to_json(), indent=1)
    of_two = summarize(read_steps(OLD), RunOutcome.SUCCEEDED, "4 steps done", 1).to_json()
    assert list(of_two) == list(content)
    assert [list(row) for row in of_two["phases"]] == [list(row) for row in content["phases"]]


def test_what_another_version_adds_is_no_error() -> None:
    content = json.loads((OLD / "steps.jsonl").read_text(encoding="utf-8").splitlines()[0])
    newer = {**content, "bubble": 0.5, "metrics": {**content["metrics"], "new/metric": "text"}}
    newer["weights"] = {**content["weights"], "transport": {"kind": "broadcast"}}
    record = StepRecord.parse(newer)
    assert record == StepRecord.parse({**content, "metrics": newer["metrics"]})


def test_what_older_versions_did_not_write_has_its_default() -> None:
    content = json.loads((OLD / "steps.jsonl").read_text(encoding="utf-8").splitlines()[0])
    for name in ("switch_seconds", "nested", "applied", "recovered", "busy_seconds", "overlapped", "rerun"):
        del content[name]
    record = StepRecord.parse(content)
    assert (record.switch_seconds, record.applied, record.recovered, record.rerun) == (0.0, True, False, False)
