from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from record_cases import bare, run_folder, write_run, write_samples, write_step
from support.trace_rules import read_strictly

from rljob_api import metrics as m
from rljob_api.phases import PHASES
from rljob_api.reward_parts import PREFIX
from rljob_api.safe_text import visible
from rljob_api.step_metrics import STEP_METRICS, is_step_metric
from rljob_api.wire.step_record import StepRecord
from rljob_worker.cli.main import main
from rljob_worker.errors import UserError
from rljob_worker.phases import StepTiming
from rljob_worker.records.steps import StepLog, read_steps
from rljob_worker.records.writer import RecordWriter
from rljob_worker.report import plot
from rljob_worker.report.build import build_report
from rljob_worker.report.curves import label_of, running_mean
from rljob_worker.report.page_data import run_data
from rljob_worker.report.panel_list import COLORS, ELSEWHERE, PANELS
from rljob_worker.report.panels import panels_of
from rljob_worker.report.plot import plot_run
from rljob_worker.report.table import phase_table_text
from rljob_worker.report.tokens import token_rows

HOSTILE = '</td></table><script>alert("x")</script><img src=x onerror=alert(1)>&amp; \x1b[31m \u202egnp \ud800 日本'


class Page(HTMLParser):
    """Fails on a tag that is not closed in order; keeps tags and visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") for name, _ in attrs)
        self.open.append(tag)
        self.tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_well_formed_and_shows_hostile_samples_and_names_as_text(tmp_path: Path) -> None:
    write_run(tmp_path, 30)
    run = json.loads((tmp_path / "run.json").read_text())
    run["job"]["metadata"] = {"name": f"job {HOSTILE}", "annotations": {"note": f"job {HOSTILE}"}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    write_samples(tmp_path, 30, [HOSTILE, "fine"] * 8, [0.1, 0.9] * 8)
    html, png = build_report(tmp_path)
    text = html.read_bytes().decode("utf-8")
    page = Page(text)
    assert page.tags.count("script") == 4, "the data and three scripts of ours"
    assert page.tags.count("img") == 1
    assert '</td></table><script>alert("x")</script><img src=x onerror=alert(1)>&amp;' in page.text
    assert r"\x1b[31m \u202egnp \ud800 日本" in page.text
    assert page.text.count("job </td></table><script>alert(") >= 3, "the title, the head, and the manifest"
    assert "\x1b" not in text
    assert "Worst and best samples of step 30" in page.text
    assert "trace.json.gz: the run as a trace" in page.text
    assert read_strictly(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).decode())
    assert "30 of 30" in page.text
    assert imread(png).shape[:2] == (1320 + 5 * 286, 1320), "five rows of small panels"
    assert not list(tmp_path.glob("*.tmp"))


def test_a_report_of_one_failed_step_with_nothing_measured(tmp_path: Path) -> None:
    run_folder(tmp_path)
    writer = RecordWriter(tmp_path, StepLog(tmp_path), 1, [])
    writer.metrics({"rollout/raw_reward": math.nan, "train/loss": math.nan})
    writer.write(1, StepTiming(0.5, {"rollout": 0.4}), applied=False)
    write_samples(tmp_path, 1, ["a", "b"], [math.nan, 0.5])
    html, png = build_report(tmp_path)
    assert "weight syncs verified0 of 0" in Page(html.read_text()).text.replace("\n", "")
    assert png.is_file()


def test_lanes_whose_events_were_lost_take_nothing_from_the_report(tmp_path: Path) -> None:
    run_folder(tmp_path)
    writer = RecordWriter(tmp_path, StepLog(tmp_path), 1, [])
    writer.write(1, StepTiming(0.5, {"actor_train": 0.4}, {"engine": {"rollout": 0.3}}))
    html, png = build_report(tmp_path)
    text = Page(html.read_text()).text
    assert (
        "What each lane did cannot be drawn: events.jsonl: the run has not begun step 1, or says nothing of it" in text
    )
    assert png.is_file()
    with pytest.raises(UserError, match=r"events\.jsonl: the run has not begun step 1"):
        build_report(tmp_path, range(1, 2))


def test_nothing_to_report_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        build_report(tmp_path / "missing")
    with pytest.raises(UserError, match="not a run folder"):
        build_report(tmp_path)
    run_folder(tmp_path)
    with pytest.raises(UserError, match="no step was finished yet"):
        build_report(tmp_path)
    assert phase_table_text(tmp_path) == ""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that were saved, without the cost of rendering them."""
    figures: list[Figure] = []
    monkeypatch.setattr(plot.Figure, "savefig", lambda self, path, **more: figures.append(self))
    return figures


@pytest.mark.parametrize("steps", [1, 5, 150, 3000])
def test_the_stack_is_as_high_as_the_steps_were_long(tmp_path: Path, drawn: list[Figure], steps: int) -> None:
    records = write_run(tmp_path, steps, scale=steps / 4)
    plot_run(records, "title", tmp_path / "x.png")
    stacks = drawn[0].axes[1].patches
    edges, top = stacks[-1].get_data().edges, stacks[-1].get_data().values
    assert (edges[0], edges[-1]) == (0.5, steps + 0.5)
    assert len(top) == min(steps, 150)
    seconds = float((top * np.diff(edges)).sum())
    assert seconds == pytest.approx(sum(record.step_seconds for record in records))
    assert [text for text in _legend(drawn[0], 1) if text.startswith("rollout  ")]


def _legend(figure: Figure, axes: int) -> list[str]:
    legend = figure.axes[axes].get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_evaluations_and_restarts_are_shown(tmp_path: Path, drawn: list[Figure]) -> None:
    records = write_run(tmp_path, 60)
    records[30:] = [replace(record, attempt=2) for record in records[30:]]
    plot_run(records, "title", tmp_path / "x.png")
    assert {"mean reward", "eval/synthetic", "restart"} <= set(_legend(drawn[0], 0))
    line = next(line for line in drawn[0].axes[0].lines if line.get_label() == "eval/synthetic")
    assert list(line.get_xdata()) == [25, 50]


@pytest.mark.parametrize(
    ("values", "scale"),
    [([1e-3, 2e-3], "log"), ([0.0, 2e-3], "symlog"), ([0.0, 0.0], "linear"), ([None, None], "linear")],
)
def test_the_difference_axis_shows_zeros(
    tmp_path: Path, drawn: list[Figure], values: list[float | None], scale: str
) -> None:
    records = [
        replace(record, metrics={**record.metrics, m.LOGPROB_KEY: value, m.LOGPROB_MAX_KEY: value})
        for record, value in zip(write_run(tmp_path, 2), values, strict=True)
    ]
    plot_run(records, "title", tmp_path / "x.png")
    axes = drawn[0].axes[2]
    assert axes.get_yscale() == scale
    low, high = axes.get_ylim()
    assert all(low < value < high for value in values if value is not None)


def test_what_was_measured_has_a_panel_and_nothing_else(tmp_path: Path, drawn: list[Figure]) -> None:
    records = write_run(tmp_path, 60)
    panels = {panel.title: list(panel.curves) for panel in panels_of(records)}
    assert panels == {
        "Response length": ["rollout/response_len/mean"],
        "Truncated responses": ["rollout/truncated_ratio"],
        "Entropy of the policy": ["train/entropy_loss"],
        "Gradient norm": ["train/grad_norm"],
        "Loss": ["train/loss"],
        "Spread of the rewards": ["rollout/raw_reward_std"],
        "Tokens of the responses": ["rollout/response_tokens"],
        "Evaluation: mean reward": ["eval/synthetic"],
        "Evaluation: passed and truncated": ["eval/synthetic/pass@1"],
    }
    plot_run(records, "title", tmp_path / "x.png")
    titles = [axes.get_title() for axes in drawn[0].axes]
    assert titles[3:] == list(panels)
    (evaluated,) = drawn[0].axes[3 + titles[3:].index("Evaluation: mean reward")].lines
    assert list(evaluated.get_xdata()) == [25, 50]
    curve = next(line for line in drawn[0].axes[6].lines if line.get_label() == "gradient norm")
    assert list(curve.get_ydata()) == [record.metric("train/grad_norm") for record in records]
    bare = [replace(record, metrics={}) for record in records]
    plot_run(bare, "title", tmp_path / "x.png")
    assert len(drawn[1].axes) == 3


def test_each_metric_that_a_record_can_have_has_one_place_in_the_report() -> None:
    in_panels = [name for panel in PANELS for name in panel.curves]
    assert len(in_panels) == len(set(in_panels)), "no metric is drawn twice"
    assert STEP_METRICS - {*in_panels, *ELSEWHERE} == set(), "a new metric: a panel of panel_list.py gets it"
    assert {*in_panels} & {*ELSEWHERE} == set()
    unknown = [name for name in (*in_panels, *ELSEWHERE) if not is_step_metric(name)]
    assert unknown == [], "no record has it"
    assert all(len(panel.curves) <= len(COLORS) for panel in PANELS)


def test_a_run_that_measured_everything_is_drawn_whole() -> None:
    every = dict.fromkeys(STEP_METRICS, 0.5)
    phases = dict.fromkeys(PHASES, 0.1)
    records = [bare(step, metrics=every, phases=phases, step_seconds=9.0) for step in (1, 2, 3)]
    data = run_data("every", records)
    shown = {curve["metric"] for panel in data["panels"] for curve in panel["curves"]}
    shown |= {f"perf/{name}_time" for name in data["phases"]}
    assert STEP_METRICS - shown == {"perf/step_time", "perf/switch_time", "perf/train_wait_time"}


def test_the_band_of_the_reward_stays_within_what_occurred(tmp_path: Path, drawn: list[Figure]) -> None:
    records = write_run(tmp_path, 3)
    seen = {m.REWARD_KEY: 0.05, m.REWARD_STD_KEY: 0.2, m.REWARD_MIN_KEY: 0.0, m.REWARD_MAX_KEY: 1.0}
    plot_run([replace(record, metrics=seen) for record in records], "title", tmp_path / "x.png")
    older = {m.REWARD_KEY: 0.05, m.REWARD_STD_KEY: 0.2}
    plot_run([replace(record, metrics=older) for record in records], "title", tmp_path / "x.png")
    ends = [figure.axes[0].collections[0].get_paths()[0].get_extents() for figure in drawn]
    assert [(box.y0, pytest.approx(box.y1)) for box in ends] == [(0.0, 0.25), (pytest.approx(-0.15), 0.25)]


@pytest.mark.parametrize(("share", "top"), [(0.0, 1.06), (0.004, 0.00424), (1.0, 1.06)])
def test_shares_are_read_against_zero(tmp_path: Path, drawn: list[Figure], share: float, top: float) -> None:
    records = [replace(record, metrics={"rollout/truncated_ratio": share}) for record in write_run(tmp_path, 2)]
    plot_run(records, "title", tmp_path / "x.png")
    low, high = drawn[0].axes[3].get_ylim()
    assert (low < 0, high) == (True, pytest.approx(top))


def test_curves_of_evaluations_begin_at_step_0_and_the_time_of_steps_does_not(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    run_folder(tmp_path)
    writer = RecordWriter(tmp_path, StepLog(tmp_path), 1, [])
    writer.write_evaluation_at_start(StepTiming(900.0, {"eval": 900.0}), {"eval/synthetic": 0.1}, {}, {})
    with pytest.raises(UserError, match="no step was finished yet"):
        build_report(tmp_path)
    assert phase_table_text(tmp_path) == ""
    random = np.random.default_rng(0)
    for step in range(1, 51):
        write_step(writer, random, step)
    records = read_steps(tmp_path)
    plot_run(records, "title", tmp_path / "x.png")
    reward, phases, *_ = drawn[0].axes
    line = next(line for line in reward.lines if line.get_label() == "eval/synthetic")
    assert list(line.get_xdata()) == [0, 25, 50]
    assert reward.get_xlim() == (-0.5, 50.5)
    edges = phases.patches[-1].get_data().edges
    assert (edges[0], edges[-1]) == (0.5, 50.5)
    phases_of_steps, *others = _table_of(tmp_path, records), _table_of(tmp_path / "without", records[1:])
    assert others == [phases_of_steps]


def _table_of(folder: Path, records: list[StepRecord]) -> str:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(replace(record, index=index).to_json()) for index, record in enumerate(records)]
    (folder / "steps.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return phase_table_text(folder)


def test_parts_of_a_reward_share_panels_of_as_many_as_there_are_colours(tmp_path: Path, drawn: list[Figure]) -> None:
    parts = {f"{PREFIX}part {i:02}": i / 10 for i in range(8)}
    records = [replace(r, metrics={**r.metrics, **parts, f"{PREFIX}$x$": 1.0}) for r in write_run(tmp_path, 3)]
    plot_run(records, "title", tmp_path / "x.png")
    panels = {axes.get_title(): axes for axes in drawn[0].axes[3:]}
    first, second = (panels[f"Parts of the reward, {i} of 2"] for i in (1, 2))
    assert [line.get_label() for line in first.lines] == [f"part {i:02}" for i in range(6)]
    assert [line.get_label() for line in second.lines] == ["part 06", "part 07"]
    assert list(second.lines[1].get_ydata()) == [0.7] * 3


def test_names_that_a_user_gave_are_drawn_whatever_the_font_has(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    given = {"eval/正确 $x$ $": 0.5, f"{PREFIX}长度 é": 1.0}
    records = [replace(record, metrics={**record.metrics, **given}) for record in write_run(tmp_path, 2)]
    plot_run(records, "title", tmp_path / "x.png")
    assert [str(warning.message) for warning in recwarn] == []
    labels = [label for panel in panels_of(records) for label in panel.curves.values()]
    assert {"正确 $x$ $", "长度 é"} <= set(labels)
    assert {label_of(label) for label in labels} >= {r"\u6b63\u786e \$x\$ \$", r"\u957f\u5ea6 é"}


def test_a_bar_that_is_cut_off_is_named(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_run(write_run(tmp_path, 150), "title", tmp_path / "x.png")
    assert [text.get_text() for text in drawn[0].axes[1].texts] == ["▲ 1.14 s"]


def test_running_mean_leaves_out_what_was_not_measured() -> None:
    assert running_mean(np.array([1.0, np.nan, 3.0, 5.0]), 2).tolist() == [1.0, 1.0, 3.0, 4.0]
    assert np.isnan(running_mean(np.array([np.nan, 1.0]), 1)[0])


def test_the_table_adds_up(tmp_path: Path) -> None:
    write_run(tmp_path, 50)
    lines = phase_table_text(tmp_path).splitlines()
    assert len({len(line) for line in lines}) == 1
    shares = {line[:22].strip(): float(line.split("%")[0].split()[-1]) for line in lines[1:] if "%" in line}
    assert shares.pop("step") == 100.0
    switch = shares.pop("of which switch")
    assert sum(shares.values()) == pytest.approx(100, abs=0.6)
    assert 5 < switch < 20


HOSTILE_PHASE = "x\x1b[2J\u202e$\\frac{\nstep    0.0 ms"


def test_phase_names_of_a_foreign_run_are_shown_and_not_obeyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder(tmp_path)
    log = StepLog(tmp_path)
    for step in (1, 2):
        log.append(bare(step, phases={HOSTILE_PHASE: 0.5, "rollout": 0.2}, other=0.3))
    log.close()
    assert main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert visible(shown) == shown
    (line,) = [line for line in shown.splitlines() if line.startswith("x")]
    assert line.startswith(r"x\x1b[2J\u202e$\frac{\nstep    0.0 ms")


def test_visible_escapes_what_a_terminal_would_obey() -> None:
    assert visible("plain") == "plain"
    assert visible("a\tb\n日本 é") == "a\tb\n日本 é"
    assert visible("\x1b]0;x\x07 \r \x9b \u202e \u2028") == r"\x1b]0;x\x07 \r \x9b \u202e \u2028"
    json.dumps(visible("\ud800")).encode()


def test_the_tokens_of_a_run_are_told_by_what_became_of_them_and_by_age() -> None:
    assert token_rows([bare(1, metrics={"rollout/response_tokens": 9.0})]) == [], "all were trained on at once"
    tail = {"rollout/response_tokens": 40.0, "rollout/deferred_tokens": 10.0, "rollout/surplus_tokens": 20.0}
    assert token_rows([bare(step, metrics=tail) for step in (1, 2)]) == [
        ["trained on", "40", "40.0 %"],
        ["surplus, sampled again", "40", "40.0 %"],
        ["deferred, sampled again", "20", "20.0 %"],
    ]
    partial = {"rollout/response_tokens": 100.0, "rollout/filtered_tokens": 20.0, "rollout/carried_tokens": 50.0}
    of_ages = ({"rollout/staleness/tokens_0": 80.0}, {f"rollout/staleness/tokens_{age}": 40.0 for age in (0, 10)})
    assert token_rows([bare(step, metrics=partial | ages) for step, ages in enumerate(of_ages, 1)]) == [
        ["trained on", "160", "64.0 %"],
        ["filtered", "40", "16.0 %"],
        ["carried, after the last step", "50", "20.0 %"],
        ["of those trained on: 0 updates old", "120", "75.0 %"],
        ["of those trained on: 10 updates old", "40", "25.0 %"],
    ]


def test_the_page_tells_the_tail_of_rollout_and_the_tokens(tmp_path: Path) -> None:
    run_folder(tmp_path)
    log = StepLog(tmp_path)
    for step, (share, seconds) in enumerate(((0.5, 1.0), (0.1, 3.0)), 1):
        metrics = {m.ROLLOUT_TAIL_KEY: share, "rollout/response_tokens": 8.0, "rollout/deferred_tokens": 2.0}
        log.append(bare(step, phases={"rollout": seconds}, metrics=metrics))
    text = Page(build_report(tmp_path)[0].read_text()).text
    assert "of rollout with fewer than half of its places busy20.0 %" in text
    assert "deferred, sampled again420.0 %" in text
    assert [panel.title for panel in panels_of(read_steps(tmp_path))].count("Tail of rollout") == 1


def test_a_report_that_another_process_has_begun_is_left_to_it(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    theirs = [tmp_path / f"{name}.tmp" for name in ("report.html", "report.png", "trace.json.gz")]
    for path in theirs:
        path.write_text("half of it")
    build_report(tmp_path)
    assert [path.read_text() for path in theirs] == ["half of it"] * 3
    assert not [path for path in tmp_path.glob("*.tmp") if path not in theirs]
