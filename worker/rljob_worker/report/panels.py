"""The small panels of a report: what people look at when a reward curve bends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes

from rljob_api.reward_parts import PREFIX, PartNames
from rljob_api.wire.step_record import StepRecord
from rljob_worker.report.curves import Array, draw_line, label_of, metric_of
from rljob_worker.report.panel_list import COLORS, PANELS, SHARE, Panel

COLUMNS = 2
_EVALUATION = "eval/"
_WIDEST, _THINNEST = 2.6, 1.3
"""Points."""


def panels_of(records: Sequence[StepRecord]) -> list[Panel]:
    """The panels that these records have something for, with the curves that were measured at all."""
    measured = {name for record in records for name, value in record.metrics.items() if value is not None}
    evaluated = {name: name.removeprefix(_EVALUATION) for name in measured if name.startswith(_EVALUATION)}
    rewards = evaluated_rewards(records)
    shares = {name: label for name, label in evaluated.items() if name not in rewards}
    parts = PartNames()
    for record in records:
        parts.admit(record.reward_parts())
    found = [
        *PANELS,
        *_divided(Panel("Parts of the reward", "mean over samples", {f"{PREFIX}{name}": name for name in parts})),
        *_divided(Panel("Evaluation: mean reward", "reward", rewards, sparse=True)),
        *_divided(Panel("Evaluation: passed and truncated", SHARE, shares, sparse=True)),
    ]
    found = [replace(p, curves={n: label for n, label in p.curves.items() if n in measured}) for p in found]
    return [panel for panel in found if panel.curves]


def evaluated_rewards(records: Sequence[StepRecord]) -> dict[str, str]:
    """Metric -> label, of the mean rewards of evaluations."""
    measured = {name for record in records for name in record.metrics if _is_mean_reward(name)}
    return {name: name.removeprefix(_EVALUATION) for name in sorted(measured)}


def _is_mean_reward(name: str) -> bool:
    return name.startswith(_EVALUATION) and not name.endswith("/truncated_ratio") and "/pass@" not in name


def _divided(panel: Panel) -> list[Panel]:
    """The panel's curves by name, in panels of as many as there are colours."""
    names, most = sorted(panel.curves), len(COLORS)
    groups = [names[first : first + most] for first in range(0, len(names), most)]
    titles = (
        [panel.title] if len(groups) < 2 else [f"{panel.title}, {i + 1} of {len(groups)}" for i in range(len(groups))]
    )
    return [replace(panel, title=t, curves={n: panel.curves[n] for n in g}) for t, g in zip(titles, groups)]


def draw_panel(axes: Axes, panel: Panel, steps: Array, records: Sequence[StepRecord]) -> None:
    """Draw one panel."""
    # The later a curve is drawn the thinner it is: equal ones are all to be seen.
    widths = np.linspace(_WIDEST, _THINNEST, len(panel.curves)) if len(panel.curves) > 1 else [_THINNEST]
    for (name, text), color, width in zip(panel.curves.items(), COLORS, widths):
        label, values = label_of(text), metric_of(records, name)
        if panel.sparse:
            given = np.isfinite(values)
            axes.plot(
                steps[given], values[given], color=color, marker="o", ms=2 + width, lw=width, ls="--", label=label
            )
        else:
            draw_line(axes, steps, values, color, label, float(width))
    if panel.unit == SHARE:
        _from_zero(axes, np.concatenate([metric_of(records, name) for name in panel.curves]))
    axes.set(ylabel=panel.unit)
    axes.set_title(panel.title, fontsize="medium")
    axes.legend(fontsize="x-small", loc="best", framealpha=0.7)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def _from_zero(axes: Axes, values: Array) -> None:
    """Shares are read against 0; where all are 0, against 1."""
    top = float(np.nanmax(values)) or 1.0
    axes.set_ylim(-0.03 * top, 1.06 * top)
