"""The table and the page of an evaluation without training."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from record_cases import run_folder
from test_run_report import HOSTILE, Page

from rljob_api.wire.step_record import StepRecord
from rljob_worker.cli.main import main
from rljob_worker.host.files import WriteFailures
from rljob_worker.records.trajectories import write_evaluated
from rljob_worker.report.evaluation import (
    evaluation_of,
    evaluation_text,
    read_evaluation,
    write_evaluation,
    write_evaluation_page,
)

METRICS = {
    "eval/a": 0.25, "eval/a/truncated_ratio": 0.5, "eval/a/pass@1": 0.25, "eval/a/pass@10": 1.0,
    "eval/b": 2.0, "eval/b/truncated_ratio": 0.0, "eval/b/pass@2": 0.125,
}  # fmt: skip


def row(source: str, prompt: int, sample: int, reward: float, error: str | None = None) -> dict[str, Any]:
    return {
        "source": source, "prompt_uid": f"{source}/{prompt}", "prompt": HOSTILE, "label": HOSTILE, "sample": sample,
        "response": HOSTILE, "response_tokens": 3, "finish_reason": "stop", "reward": reward,
        "reward_parts": {HOSTILE: 0.5} if source == "a" else {}, "reward_error": error, "decision": "evaluated",
        "advantage": None, "weight_version": 0, "spans": [],
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = run_folder(tmp_path / "evaluated")
    record = StepRecord(0, 1, 1.5, 1.5, {"eval": 1.5}, 0.0, 0.0, metrics=METRICS, index=0)
    (folder / "steps.jsonl").write_text(json.dumps(record.to_json()) + "\n")
    rows = [row("a", prompt, sample, float(prompt == sample == 0)) for prompt in range(2) for sample in range(2)]
    assert write_evaluated(folder, [*rows, row("b", 7, 0, 2.0, error=HOSTILE)], WriteFailures())
    write_evaluation(folder, evaluation_of(folder, "/runs/try/checkpoints/step-4 (step 4)"))
    return folder


def test_the_table_has_a_line_for_each_set_and_a_column_for_each_k(folder: Path) -> None:
    found = read_evaluation(folder)
    assert found == evaluation_of(folder, found.weights)
    about, head, first, second, failed = evaluation_text(found).splitlines()
    assert about == "weights /runs/try/checkpoints/step-4 (step 4)"
    assert head.split()[:9] == [
        "set",
        "prompts",
        "responses",
        "mean",
        "std",
        "pass@1",
        "pass@2",
        "pass@10",
        "truncated",
    ]
    assert first.split() == ["a", "2", "4", "0.2500", "0.4330", "0.2500", "-", "1.0000", "0.5000", "0", "0.5000"]
    assert second.split() == ["b", "1", "1", "2.0000", "0.0000", "-", "0.1250", "-", "0.0000", "1", "-"]
    assert failed == "b: the reward of 1 response failed; `rljob samples` shows why"


def test_the_page_shows_hostile_texts_and_obeys_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Page(write_evaluation_page(folder).read_text(encoding="utf-8"))
    assert page.tags.count("script") == 4
    assert "img" not in page.tags
    below = [tag for tag in page.tags if tag in ("h2", "table")]
    assert below[0] == "table", "the facts, below the page's name"
    assert all(one != other for one, other in pairwise(below)), "each other table has a heading of its own"
    assert 'alert("x")' in page.text
    assert "\x1b" not in page.text
    assert main(["report", str(folder)]) == 0
    assert "pass@10" in capsys.readouterr().out
    assert main(["samples", str(folder)]) == 0
    assert "reward failed" in capsys.readouterr().out


def test_a_damaged_file_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "evaluation.json").write_text('{"weights": 1}')
    assert main(["report", str(folder)]) == 2
    assert "evaluation.json: damaged" in capsys.readouterr().err
