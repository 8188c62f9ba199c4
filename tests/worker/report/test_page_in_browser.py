"""Reports as a browser shows them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from record_cases import run_folder, write_run, write_sample_tokens, write_samples
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
    # Differences from which on uPlot's own ticks of a logarithmic axis never end.
    differences = {"train/train_rollout_logprob_abs_diff": 9.6e-8, "train/train_rollout_logprob_abs_diff_max": 1.4e-6}
    write_run(tmp_path / "other", 20, **differences)
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
    assert 'class="u-title">Loss<span class="unit">weighted sum over tokens</span>' in shown.dom
    assert shown.dom.count("<article>") == 4
    articles = shown.dom.split("<article>", 1)[1]
    assert "&lt;/script&gt;&lt;script&gt;document.title='taken'" in articles
    assert r"\x1b[31m \u202egnp" in articles
    assert "9,980,000 characters are not in this page" in articles
    assert re.search(r"<tr><td>rollout \(other &lt;script&gt;", shown.dom), "phases of both runs"
    marker = r'<div class="u-marker" style="border: 2px (\w+) [^"]*"></div><div class="u-label">([^<]*)</div>'
    entries = re.findall(marker, shown.dom)
    assert [label for line, label in entries if line == "dashed"], "those of the other run"
    assert all(label.endswith(", dashed)") == (line == "dashed") for line, label in entries)


def test_tokens_are_coloured_and_name_their_numbers_and_none_is_obeyed(tmp_path: Path) -> None:
    write_run(tmp_path, 5)
    texts = [
        "fine",
        f" </script>{TAKES_OVER}<!--",
        "\u202egnp\x1b[31m",
        "x" * 200,
        "<img src=x onerror=alert(1)>",
        "\n",
    ]
    response = "".join(texts)
    write_samples(tmp_path, 5, [response, "y" * 10_000_000], [0.5, 0.7])
    write_sample_tokens(tmp_path, 5, 0, response, texts)
    page, _ = build_report(tmp_path)
    shown = show(page.as_uri(), tmp_path)
    assert shown.console == []
    assert "<title>sample-run</title>" in shown.dom
    pieces = re.findall(
        r'<span class="token" data-at="(\d)" style="background-color: ([^"]*)">([^<]*)</span>', shown.dom
    )
    assert [int(at) for at, _, _ in pieces] == list(range(6))
    assert pieces[1][2].startswith(" &lt;/script&gt;&lt;script&gt;")
    assert pieces[2][2] == r"\u202egnp\x1b[31m"
    strengths = [float(re.findall(r"0\.\d+", style)[0]) for _, style, _ in pieces]
    assert strengths == sorted(strengths), "the less likely the stronger"
    assert ">log-probability -4</span>" in shown.dom, "the legend"
    # What a reader does with keys: the numbers of the second token, then the other colours.
    script = """
      const read = () => {
      const text = document.querySelector('.pieces');
      for (const key of ['Home', 'ArrowRight'])
        text.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
      const select = [...document.querySelectorAll('#samples select')].at(-1);
      const steps = ['first', 'last'].map((id) => document.getElementById(id).value).join(' to ');
      document.title = `steps ${steps}, ${text.parentElement.querySelector('output').textContent}`;
      select.value = 'mismatch';
      select.dispatchEvent(new Event('input'));
      };
      const root = document.documentElement;
      if (root.dataset.ready === 'true') read();
      else new MutationObserver(read).observe(root, { attributeFilter: ['data-ready'] });
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    asked = (
        page.read_text()
        .replace("script-src ", f"script-src 'sha256-{digest}' ")
        .replace("</body>", f"<script>{script}</script></body>")
    )
    page.write_text(asked)
    shown = show(page.as_uri(), tmp_path)
    assert shown.console == []
    (title,) = re.findall("<title>(.*)</title>", shown.dom)
    assert title.startswith("steps 1 to 5, token 2 of 6: "), "half a step beside the first and the last is drawn"
    assert title.endswith("engine -2, trainer -2.25, difference -0.25, ratio 0.7788")
    assert ">trainer less likely by 1 or more</span>" in shown.dom
    assert '<span class="token" data-at="0">fine</span>' in shown.dom, "what agrees has no colour"


def test_the_policy_of_the_page_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 5)
    page, _ = build_report(tmp_path / "run")
    text = page.read_text()
    linked = re.findall(r'(?:src|href)="(?!data:image/png)([^"]*)"', text)
    assert linked == ["trace.json.gz"], "nothing is loaded, and what can be is beside it"
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
    response = "x" * 1000
    write_sample_tokens(tmp_path, 10, 0, response, list(response))
    assert sample_data(tmp_path)["steps"] == [10], "tokens are counted"
    (tmp_path / "tokens" / "step-000010.jsonl.gz").write_bytes(b"cut short")
    assert sample_data(tmp_path)["steps"] == [1, 5, 10], "without them the samples are there"
    (tmp_path / "trajectories" / "step-000010.jsonl.gz").write_bytes(b"cut short")
    assert 10 not in sample_data(tmp_path)["steps"]
