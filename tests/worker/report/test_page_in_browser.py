"""Reports as a browser shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from record_cases import run_folder, write_run, write_samples
from support.browser import show
from test_run_report import HOSTILE

from rljob_worker.report.build import build_report
from rljob_worker.report.page_data import sample_data

TAKES_OVER = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def charts(dom: str) -> list[str]:
    return re.findall(r'class="chart[^"]*" data-title="([^"]*)"', dom)


def test_the_page_draws_its_charts_and_samples_and_obeys_no_text(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 30)
    texts = [f"</script>{TAKES_OVER}<!--<script>", HOSTILE, "x" * 10_000_000, "fine\nsecond line"]
    write_samples(tmp_path / "run", 30, texts, [0.1, 0.9, 0.5, 0.7])
    write_run(tmp_path / "other", 20)
    run = json.loads((tmp_path / "other" / "run.json").read_text())
    run["job"]["metadata"]["name"] = f"other {TAKES_OVER}"
    (tmp_path / "other" / "run.json").write_text(json.dumps(run))
    page, _ = build_report(tmp_path / "run", beside=tmp_path / "other")
    assert page.stat().st_size < 3_000_000, "a response of 10 MB is cut"
    shown = show(page.as_uri(), tmp_path)
    assert shown.console == []
    assert 'data-ready="true"' in shown.dom
    assert "<title>sample-run</title>" in shown.dom, "no text was run"
    drawn = charts(shown.dom)
    assert drawn[0] == "Reward of training samples and of evaluations"
    assert sum(title.startswith("Where each step's time went") for title in drawn) == 2, "a chart for each run"
    assert shown.dom.count("<canvas") == len(drawn) >= 8
    assert shown.dom.count("<article>") == 4
    articles = shown.dom.split("<article>", 1)[1]
    assert "&lt;/script&gt;&lt;script&gt;document.title='taken'" in articles
    assert r"\x1b[31m \u202egnp" in articles
    assert "9,980,000 characters are not in this page" in articles
    assert re.search(r"<tr><td>rollout \(other &lt;script&gt;", shown.dom), "phases of both runs"


def test_the_policy_of_the_page_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 5)
    page, _ = build_report(tmp_path / "run")
    text = page.read_text()
    assert not re.search(r'(?:src|href)="(?!data:image/png)', text), "nothing is loaded"
    page.write_text(text.replace("</body>", f"{TAKES_OVER}</body>"))
    shown = show(page.as_uri(), tmp_path)
    assert "<title>sample-run</title>" in shown.dom
    assert any("Content Security Policy" in line for line in shown.console)


def test_samples_of_many_steps_stay_within_the_page_s_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder(tmp_path)
    for step in range(1, 11):
        write_samples(tmp_path, step, ["x" * 1000], [0.5])
    every = sample_data(tmp_path)
    assert every["steps"] == list(range(1, 11))
    assert every["note"] == ""
    monkeypatch.setattr("rljob_worker.report.page_data._SAMPLE_CHARACTERS", 3500)
    some = sample_data(tmp_path)
    assert some["steps"] == [1, 5, 10], "the first, the newest, and the middle"
    assert some["note"].startswith("3 of 10 steps with samples are in this page")
    (tmp_path / "trajectories" / "step-000010.jsonl.gz").write_bytes(b"cut short")
    assert 10 not in sample_data(tmp_path)["steps"]
