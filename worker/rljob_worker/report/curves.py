"""Metrics of step records as curves."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties, findfont, get_font

from rljob_api.wire.step_record import StepRecord

Array = npt.NDArray[np.float64]

_MARKED_STEPS = 40
_SMOOTHED_STEPS = 200


@functools.cache
def _characters() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties())).get_charmap())


def label_of(text: str) -> str:
    """A text that a user gave, for matplotlib: what its font lacks is escaped, and no dollar sign begins a formula."""
    known = (c if ord(c) in _characters() else c.encode("ascii", "backslashreplace").decode() for c in text)
    return "".join(known).replace("$", r"\$")


def metric_of(records: Sequence[StepRecord], name: str) -> Array:
    """A metric by record, [n]; NaN where it was not measured."""
    values = [record.metric(name) for record in records]
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def draw_line(axes: Axes, steps: Array, values: Array, color: str, label: str, width: float = 1.5) -> None:
    """A curve with a mark at each step where there are few, and its running mean where there are many."""
    # Not what was measured at step 0: a run has as many steps with it as without.
    count = np.count_nonzero(steps)
    if count <= _SMOOTHED_STEPS:
        marker = "o" if count <= _MARKED_STEPS else None
        axes.plot(steps, values, color=color, lw=width, marker=marker, markersize=3.5, label=label)
        return
    window = int(count) // 100
    axes.plot(steps, values, color=color, lw=0.5, alpha=0.35)
    axes.plot(steps, running_mean(values, window), color=color, lw=width + 0.3, label=f"{label}, {window}-step mean")


def running_mean(values: Array, window: int) -> Array:
    """Mean of the last `window` values at each position, [n]; fewer at the start, NaN values left out."""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    end = np.arange(1, len(values) + 1)
    begin = np.maximum(end - window, 0)
    count = counts[end] - counts[begin]
    return np.divide(sums[end] - sums[begin], count, out=np.full(len(values), np.nan), where=count > 0)
