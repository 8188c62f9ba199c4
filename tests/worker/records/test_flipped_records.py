"""A flipped bit anywhere in a run folder's records: it is refused or passed over, or what is read is the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from record_cases import bare
from support.flips import flips

from rljob.runs import Run
from rljob_api.wire.run_status import RUN_FILE, RunDescription, RunOutcome
from rljob_worker.errors import JobError, UserError
from rljob_worker.host.files import WriteFailures, write_whole
from rljob_worker.host.sealed_json import sealed, unsealed
from rljob_worker.records.event_lines import read_events
from rljob_worker.records.events import EventLog
from rljob_worker.records.run_files import read_run
from rljob_worker.records.step_files import read_step_file, write_step_file
from rljob_worker.records.steps import StepLog, read_steps
from rljob_worker.records.summary import summarize, write_summary
from rljob_worker.report.evaluation import Count, EvaluatedSet, Evaluation, read_evaluation, write_evaluation

TURN = {"action": "Left", "observation": "P _ G", "reward": -0.1, "done": False, "values": {"valid": 1.0}}
SAMPLE = {"ordinal": 7, "decision": "trained", "reward": 0.5, "turns": [TURN, TURN | {"done": True}]}


def records(folder: Path) -> None:
    log = StepLog(folder)
    for step in (1, 2, 3):
        log.append(bare(step, metrics={"rollout/raw_reward": 0.25 * step}, stopped_early="" if step < 3 else "enough"))
    log.close()


def events(folder: Path) -> None:
    log = EventLog(folder, 1)
    for phase in ("rollout", "actor_train"):
        log.phase(phase, 0.25)
    log.close()


def description(folder: Path) -> None:
    job = {"metadata": {"name": "a"}, "spec": {"steps": 160}}
    write_whole(folder / RUN_FILE, sealed(RunDescription(job, 3, 17, "abc", 3).to_json(), indent=1))


def evaluation(folder: Path) -> None:
    one = EvaluatedSet("a", 16, 1, 0.5, 0.25, 0.0, {"1": 0.5}, 0, {}, [Count(0.0, 1.0, 8)])
    write_evaluation(folder, Evaluation("weights", 1.5, [one]))


def summary(folder: Path) -> None:
    write_summary(folder, summarize([bare(1), bare(2)], RunOutcome.SUCCEEDED, "done", 1))


def trajectories(folder: Path) -> None:
    write_step_file(folder, 12, [SAMPLE, SAMPLE | {"ordinal": 8}], "trajectories", WriteFailures())


FILES: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "steps.jsonl": (records, lambda folder: [one.to_json() for one in read_steps(folder)]),
    RUN_FILE: (description, read_run),
    "evaluation.json": (evaluation, lambda folder: asdict(read_evaluation(folder))),
    "summary.json": (summary, lambda folder: Run(folder, "a", {}).summary()),
    "step-000012.jsonl.gz": (trajectories, lambda folder: read_step_file(folder / "step-000012.jsonl.gz")),
}
"""File -> how it is written and read."""


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused_by_its_name_or_the_same(tmp_path: Path, name: str) -> None:
    write, read = FILES[name]
    write(tmp_path)
    whole, refused = read(tmp_path), list[str]()
    for where in flips(tmp_path / name, but_last=name.endswith("l")):
        try:
            assert read(tmp_path) == whole, where
        except (JobError, UserError) as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all(str(tmp_path / name) in one for one in refused)
    assert read(tmp_path) == whole


def _kept(found: list[Any], whole: list[Any]) -> bool:
    """Whether what is found is some of the whole, in its order."""
    left: Iterator[Any] = iter(whole)
    return all(any(one == other for other in left) for one in found)


def test_an_event_is_passed_over_or_the_same(tmp_path: Path) -> None:
    events(tmp_path)
    whole = read_events(tmp_path)
    assert len(whole) == 2
    for where in flips(tmp_path / "events.jsonl", but_last=True):
        assert _kept(read_events(tmp_path), whole), where


def test_a_run_goes_on_without_a_damaged_record(tmp_path: Path) -> None:
    records(tmp_path)

    def found() -> list[dict[str, Any]]:
        log = StepLog(tmp_path)
        log.close()
        return [{**one.to_json(), "index": 0} for one in log.records()]

    whole, damaged = found(), 0
    for where in flips(tmp_path / "steps.jsonl", but_last=True):
        left = found()
        assert _kept(left, whole), where
        aside = tmp_path / "steps.jsonl.damaged"
        assert aside.exists() == (len(left) < len(whole)), where
        damaged += aside.exists()
        aside.unlink(missing_ok=True)
    assert damaged > 100


@pytest.mark.parametrize("indent", [None, 1])
def test_a_sealed_text_is_json_with_a_field_more(indent: int | None) -> None:
    value = {"a": [1, {"crc32": "b"}], "text": 'é ", "crc32": "0"}'}
    text = sealed(value, indent=indent)
    assert unsealed(text) == value
    assert list(json.loads(text)) == [*value, "crc32"]
    assert unsealed(json.dumps(value)) == value, "one of an earlier version"
    with pytest.raises(ValueError, match=r"its content is not what was written \(crc32\)"):
        unsealed(text.replace('"a"', '"b"'))
    with pytest.raises(ValueError, match="not what was written"):
        unsealed('"crc33"'.join(text.rsplit('"crc32"', 1)))
