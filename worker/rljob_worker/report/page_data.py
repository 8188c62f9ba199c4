"""The data behind an interactive report: the curves and phases of runs, and samples, as JSON."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rljob_api import metrics as m
from rljob_api.json_types import JsonObject
from rljob_api.looks import PHASE_COLORS
from rljob_api.phases import PHASES
from rljob_api.safe_text import visible, visible_line
from rljob_api.wire.step_record import StepRecord
from rljob_worker.errors import UserError
from rljob_worker.records.token_files import SampleTokens, StepTokens, read_tokens
from rljob_worker.records.trajectories import read_trajectories, trajectory_files
from rljob_worker.report.panels import COLORS, Panel, evaluated_rewards, panels_of
from rljob_worker.report.text import excerpt

_SAMPLE_CHARACTERS = 4_000_000
"""Characters of all samples in a page."""
_TOKEN_CHARACTERS = 20
"""Characters of a token's numbers."""
_MOST_VALUES = 1_500_000
"""Values of all metrics; beyond it only those of the panels are in the page."""
_DIGITS = 6
_BLUE, _RED, _GRAY = "#1f77b4", "#d62728", "#bdbdbd"


def run_data(name: str, records: Sequence[StepRecord]) -> JsonObject:
    """The curves of one run.

    Args:
        name: of the run.
        records: in order, each step once; that of step 0 (an evaluation) may be before the first.

    Returns:
        Lists that have a value for each record, null where it was not measured; panels name their metrics.
    """
    panels = [_reward_panel(records), _difference_panel(), *map(_panel, panels_of(records))]
    metrics = sorted({metric for record in records for metric in record.metrics})
    if len(metrics) * len(records) > _MOST_VALUES:
        drawn = {curve["metric"] for panel in panels for curve in panel["curves"]}
        metrics = [metric for metric in metrics if metric in drawn]
    return {
        "name": visible_line(name),
        "steps": [record.step for record in records],
        "attempts": [record.attempt for record in records],
        "timed": [record.is_step for record in records],
        "seconds": [_rounded(record.step_seconds) for record in records],
        "phases": _phases(records),
        "lanes": {lane: True for record in records for lane in record.lanes},
        "colors": PHASE_COLORS,
        "metrics": {metric: [_rounded(record.metric(metric)) for record in records] for metric in metrics},
        "panels": panels,
    }


def _phases(records: Sequence[StepRecord]) -> dict[str, list[float | None]]:
    had = {name for record in records for name in record.phases}
    names = [name for name in PHASES if name in had] + sorted(had.difference(PHASES))
    phases = {name: [_rounded(record.phases.get(name)) for record in records] for name in names}
    return phases | {"other": [_rounded(max(0.0, record.other)) for record in records]}


def _reward_panel(records: Sequence[StepRecord]) -> dict[str, Any]:
    curves = [
        {"metric": m.REWARD_KEY, "label": "mean reward", "color": _BLUE},
        {"metric": m.REWARD_MAX_KEY, "label": "highest", "color": "#9ecae1", "thin": True},
        {"metric": m.REWARD_MIN_KEY, "label": "lowest", "color": "#9ecae1", "thin": True},
    ]
    evaluated = evaluated_rewards(records)
    curves += [
        {"metric": name, "label": visible_line(label), "color": COLORS[(1 + number) % len(COLORS)], "sparse": True}
        for number, (name, label) in enumerate(sorted(evaluated.items()))
    ]
    title = "Reward of training samples" + (" and of evaluations" if evaluated else "")
    return {"title": title, "unit": "reward", "curves": curves, "wide": True}


def _difference_panel() -> dict[str, Any]:
    curves = [
        {"metric": m.LOGPROB_MAX_KEY, "label": "largest of any token", "color": _GRAY},
        {"metric": m.LOGPROB_KEY, "label": "mean over tokens", "color": _RED},
    ]
    title = "Trainer against engine: log-probability difference"
    return {"title": title, "unit": "nats", "curves": curves, "log": True}


def _panel(panel: Panel) -> dict[str, Any]:
    curves = [
        {"metric": metric, "label": visible_line(label), "color": color, "sparse": panel.sparse}
        for (metric, label), color in zip(panel.curves.items(), COLORS)
    ]
    return {"title": panel.title, "unit": panel.unit, "curves": curves}


def sample_data(run_folder: Path) -> JsonObject:
    """Samples of the newest step that has them, of the first, and of steps between as far as the page's size allows.

    Each step's are packed (`packed`): the page unpacks those that it shows.
    """
    steps = sorted(trajectory_files(run_folder))
    rows: dict[str, str] = {}
    left = _SAMPLE_CHARACTERS
    for step in _spread(steps):
        try:
            samples = sample_rows(run_folder, step)
        except UserError:
            # Cut short by a kill or a full disk: `rljob samples` names it.
            continue
        size = sum(_length(sample) for sample in samples)
        if rows and size > left:
            break
        rows[str(step)], left = packed(samples), left - size
    note = f"{len(rows)} of {len(steps)} steps with samples are in this page; `rljob view` shows all."
    return {"steps": sorted(map(int, rows)), "rows": rows, "note": note if len(rows) < len(steps) else ""}


def packed(samples: list[dict[str, Any]]) -> str:
    """JSON, by gzip, in base64: tokens and their numbers take a quarter of their size in a page."""
    text = json.dumps(samples, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def sample_steps(run_folder: Path) -> JsonObject:
    """The same for a page that asks for a step's samples when it shows them."""
    return {"steps": sorted(trajectory_files(run_folder)), "rows": {}, "note": ""}


def sample_rows(run_folder: Path, step: int) -> list[dict[str, Any]]:
    """The samples of a step, as the page shows them.

    Raises:
        UserError: no samples of it, or the file is damaged.
    """
    rows = read_trajectories(run_folder, step)[1]
    try:
        tokens = read_tokens(run_folder, step)
    except UserError:
        # Cut short, or of a newer version: `rljob samples --tokens` names it.
        tokens = StepTokens()
    return [_sample(row, tokens.of(row)) for row in rows]


def _spread(steps: Sequence[int]) -> list[int]:
    """The newest, the first, then those that halve what lies between, and so on."""
    if len(steps) < 3:
        return list(reversed(steps))
    order, gaps = [len(steps) - 1, 0], [(0, len(steps) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if low < middle < high:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return [steps[index] for index in order]


def _sample(row: Mapping[str, Any], tokens: SampleTokens | None) -> dict[str, Any]:
    turns = {"turns": [_turn(turn) for turn in row["turns"]]} if "turns" in row else {}
    told = {} if tokens is None else {"tokens": _tokens(tokens)}
    return {
        "prompt_uid": visible_line(str(row["prompt_uid"])),
        "sample": row["sample"],
        "source": visible_line(str(row.get("source", ""))),
        "prompt": excerpt(row["prompt"]),
        "response": excerpt(row["response"]),
        "response_tokens": row["response_tokens"],
        "finish_reason": row["finish_reason"],
        "label": None if row["label"] is None else excerpt(str(row["label"])),
        "reward": _rounded(row["reward"]),
        "reward_parts": {visible_line(name): _rounded(value) for name, value in row["reward_parts"].items()},
        "reward_notes": {visible_line(name): excerpt(note) for name, note in row.get("reward_notes", {}).items()},
        "reward_error": excerpt(row["reward_error"] or ""),
        "advantage": _rounded(row["advantage"]),
        "decision": row.get("decision", "trained"),
        "weights": _versions(row),
        **turns,
        **told,
    }


def _tokens(tokens: SampleTokens) -> list[list[Any]]:
    """[text, the engine's log-probability, the trainer's minus that or null] of each token."""
    differences = tokens.differences if tokens.differences is not None else [None] * len(tokens.texts)
    return [list(token) for token in zip(map(visible, tokens.texts), tokens.engine, differences, strict=True)]


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "action": excerpt(turn["action"]),
        "tokens": turn["tokens"],
        **({"stream": turn["stream"]} if "stream" in turn else {}),
        "reward": _rounded(turn["reward"]),
        "observation": excerpt(turn["observation"] or ""),
        "done": turn["done"],
        "error": excerpt(str(turn["error"] or "")),
    }


def _versions(row: Mapping[str, Any]) -> str:
    versions = sorted({span["version"] for span in row.get("spans", []) if span["version"] is not None})
    return ", ".join(map(str, versions)) or str(row["weight_version"])


def _length(sample: Mapping[str, Any]) -> int:
    turns = sum(len(turn["action"]) + len(turn["observation"]) for turn in sample.get("turns", []))
    tokens = sum(len(text) + _TOKEN_CHARACTERS for text, *_ in sample.get("tokens", []))
    return len(sample["prompt"]) + len(sample["response"]) + turns + tokens


def _rounded(value: float | None) -> float | None:
    """Six significant digits: what a chart shows, at a third of the size."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")
