"""The picture of a run: reward, where the time went, whether trainer and engine agree, and what else was measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from rljob_api import metrics as m
from rljob_api.looks import PHASE_COLORS
from rljob_api.phases import PHASES
from rljob_api.wire.step_record import StepRecord
from rljob_worker.host.files import replacing, this_thread
from rljob_worker.report.curves import Array, draw_line, label_of, metric_of
from rljob_worker.report.panels import COLUMNS, Panel, draw_panel, evaluated_rewards, panels_of

_MARKERS = "oDsv^P*X"
_HEIGHT = 12.0
_PANEL_HEIGHT = 2.6
"""Inches: of the three panels over the whole width, and of a row of small ones."""
_MAX_BARS = 150
_NAMED_OUTLIERS = 8


def plot_run(records: Sequence[StepRecord], title: str, path: Path) -> Path:
    """Draw the run's step records into a PNG file.

    Args:
        records: records in order, each step once; at least one is of a step, and that of step 0 may be before it.
        title: heading.
        path: file to write.
    """
    panels = panels_of(records)
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(12, _HEIGHT + _PANEL_HEIGHT * rows), layout="constrained")
    heights = [_HEIGHT, *([_PANEL_HEIGHT * rows] if rows else [])]
    above, *below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    reward, phases, difference = above.subplots(3, 1, sharex=True, height_ratios=(1, 1.2, 0.9))
    figure.suptitle(label_of(title), fontsize="x-large")
    steps = np.array([record.step for record in records], dtype=float)
    _reward(reward, steps, records)
    timed = [record for record in records if record.is_step]
    _phases(phases, steps[-len(timed) :], timed)
    _difference(difference, steps, records)
    restarts = [b.step - 0.5 for a, b in itertools.pairwise(records) if b.attempt != a.attempt]
    for axes in (reward, phases, difference):
        for number, step in enumerate(restarts):
            axes.axvline(step, color="black", ls=":", lw=1, label="restart" if axes is reward and not number else None)
        _legend(axes, reverse=axes is phases)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.tick_params(labelbottom=True)
    difference.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    difference.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    difference.set_xlabel("step")
    if below:
        _panels(below[0], panels, rows, steps, records)
    with replacing(path, durable=False, writer=this_thread()) as file:
        figure.savefig(file, dpi=110, format="png")
    return path


def _panels(figure: SubFigure, panels: Sequence[Panel], rows: int, steps: Array, records: Sequence[StepRecord]) -> None:
    grid = figure.subplots(rows, COLUMNS, sharex=True, squeeze=False)
    for axes, panel in zip(grid.flat, panels):
        draw_panel(axes, panel, steps, records)
        axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    for axes in grid.flat[max(len(panels) - COLUMNS, 0) : len(panels)]:
        axes.set_xlabel("step")
        axes.tick_params(labelbottom=True)


def _reward(axes: Axes, steps: Array, records: Sequence[StepRecord]) -> None:
    mean, spread = metric_of(records, m.REWARD_KEY), metric_of(records, m.REWARD_STD_KEY)
    color = PHASE_COLORS["rollout"]
    # A deviation of skewed rewards reaches past all of them. The records of older versions do not have the extremes.
    low = np.fmax(mean - spread, metric_of(records, m.REWARD_MIN_KEY))
    high = np.fmin(mean + spread, metric_of(records, m.REWARD_MAX_KEY))
    axes.fill_between(steps, low, high, alpha=0.12, color=color, lw=0, label="± 1 std over samples")
    draw_line(axes, steps, mean, color, "mean reward")
    names = evaluated_rewards(records)
    for number, name in enumerate(names):
        values = metric_of(records, name)
        given = np.isfinite(values)
        color, marker = f"C{1 + number % 9}", _MARKERS[number % len(_MARKERS)]
        axes.plot(steps[given], values[given], color=color, marker=marker, ms=5, lw=1, ls="--", label=label_of(name))
    axes.set(ylabel="reward", title="Reward of training samples" + (" and of evaluations" if names else ""))


def _phases(axes: Axes, steps: Array, records: Sequence[StepRecord]) -> None:
    """Stacked seconds; many steps are averaged into at most 150 bars so that each stays visible."""
    size = -(-len(records) // _MAX_BARS)
    groups = [np.arange(first, min(first + size, len(records))) for first in range(0, len(records), size)]
    edges = np.array([*(steps[group[0]] for group in groups), steps[-1] + 1]) - 0.5
    total = sum(record.step_seconds for record in records)
    height = np.zeros(len(groups))
    for name in (*PHASES, "other"):
        seconds = np.array([_phase(record, name) for record in records])
        if seconds.any():
            values = np.array([seconds[group].mean() for group in groups])
            label = f"{name}  {_duration(float(np.median(seconds[seconds > 0])))}  {100 * seconds.sum() / total:.1f} %"
            axes.stairs(height + values, edges, baseline=height, fill=True, color=PHASE_COLORS[name], label=label, lw=0)
            height = height + values
    averaged = f", means of {size} steps" if len(records) > _MAX_BARS else ""
    axes.set(ylabel="seconds", title=f"Where each step's time went{averaged} (legend: median, share of all time)")
    _cut_outliers(axes, (edges[1:] + edges[:-1]) / 2, height)


def _cut_outliers(axes: Axes, centers: Array, height: Array) -> None:
    """Keep the common bars readable; how far the tallest of those cut off would reach is written beside them."""
    limit = 1.15 * float(np.percentile(height, 98))
    if height.max() <= 1.5 * limit:
        limit = 1.05 * float(height.max())
    axes.set_ylim(0, limit)
    tallest = np.argsort(height)[::-1][:_NAMED_OUTLIERS]
    for index in tallest[height[tallest] > limit]:
        right = index > 0.9 * len(height)
        axes.annotate(
            f"▲ {_duration(height[index])}",
            (centers[index], limit),
            xytext=(-8 if right else 8, -4),
            textcoords="offset points",
            ha="right" if right else "left",
            va="top",
            fontsize="small",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _legend(axes: Axes, reverse: bool) -> None:
    """Beside the axes, never over data; a stack's legend in the order of the stack."""
    handles, labels = axes.get_legend_handles_labels()
    order = slice(None, None, -1 if reverse else 1)
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
    axes.legend(handles[order], labels[order], fontsize="small", frameon=False, **place)


def _difference(axes: Axes, steps: Array, records: Sequence[StepRecord]) -> None:
    curves = (
        (m.LOGPROB_MAX_KEY, "largest of any token", "#bdbdbd"),
        (m.LOGPROB_KEY, "mean over tokens", "#d62728"),
    )
    drawn = []
    for name, label, color in curves:
        values = metric_of(records, name)
        if np.isfinite(values).any():
            draw_line(axes, steps, values, color, label)
            drawn.append(values[np.isfinite(values)])
    if not drawn:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="gray")
    else:
        _log_with_zeros(axes, np.concatenate(drawn))
    axes.set(ylabel="|log p(train) - log p(rollout)|", title="Trainer against engine: log-probability difference")


def _log_with_zeros(axes: Axes, values: Array) -> None:
    """A log axis where it can be: exact zeros lie on a linear strip below the smallest value."""
    positive = values[values > 0]
    if len(positive) == 0:
        axes.set_ylim(-0.05, 1)
        axes.text(0.5, 0.5, "exactly 0 in every step", transform=axes.transAxes, ha="center", color="gray")
    elif len(positive) == len(values):
        axes.set_yscale("log")
    else:
        smallest = 10.0 ** np.floor(np.log10(positive.min()))
        axes.set_yscale("symlog", linthresh=smallest, linscale=0.5)
        axes.set_ylim(-0.2 * smallest, 2 * positive.max())


def _phase(record: StepRecord, name: str) -> float:
    return float(record.other if name == "other" else record.phases.get(name, 0.0))


def _duration(seconds: float) -> str:
    return (
        f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    )
