"""The small panels of a report: what people look at when a reward curve bends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from rljob_api.reward_parts import PREFIX, PartNames
from rljob_api.wire.step_record import StepRecord
from rljob_worker.report.curves import Array, draw_line, metric_of

COLUMNS = 2
_COLORS = ("#1f77b4", "#d62728", "#238b45", "#9467bd", "#fd8d3c", "#525252")
_EVALUATION = "eval/"


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that belong together."""

    title: str
    unit: str
    curves: Mapping[str, str]
    """Metric -> label."""
    sparse: bool = False
    """Measured in some steps only: those are marked and joined."""


_PANELS = (
    Panel("Response length", "tokens", {
        "rollout/response_len/max": "longest", "rollout/response_len/mean": "mean",
        "rollout/response_len/min": "shortest",
    }),
    Panel("Truncated responses", "share", {"rollout/truncated_ratio": "cut at maxResponseTokens"}),
    Panel("Entropy of the policy", "nats", {"train/entropy_loss": "mean over tokens"}),
    Panel("Gradient norm", "before clipping", {"train/grad_norm": "gradient norm"}),
    Panel("KL divergence", "nats", {
        "train/kl_loss": "to the reference", "train/ppo_kl": "to the policy before the step",
        "train/mismatch_kl": "trainer to engine",
    }),
    Panel("Clipped tokens", "share", {"train/pg_clipfrac": "by the policy loss", "train/tis_clipfrac": "by TIS"}),
    Panel("Groups without a signal", "share", {"rollout/zero_std/ratio": "all rewards of the group are equal"}),
)  # fmt: skip


def panels_of(records: Sequence[StepRecord]) -> list[Panel]:
    """The panels that these records have something for, with the curves that were measured at all."""
    measured = {name for record in records for name, value in record.metrics.items() if value is not None}
    evaluated = sorted(name for name in measured if name.startswith(_EVALUATION))
    evaluation = Panel("Evaluation", "share or reward", {name: name for name in evaluated}, sparse=True)
    found = [
        Panel(panel.title, panel.unit, {n: label for n, label in panel.curves.items() if n in measured}, panel.sparse)
        for panel in (*_PANELS, *_reward_parts(records), evaluation)
    ]
    return [panel for panel in found if panel.curves]


def _reward_parts(records: Sequence[StepRecord]) -> list[Panel]:
    """As many curves in a panel as there are colours."""
    names = PartNames()
    for record in records:
        names.admit(record.reward_parts())
    ordered, most = sorted(names), len(_COLORS)
    shares = [ordered[first : first + most] for first in range(0, len(ordered), most)]
    title = "Parts of the reward"
    return [
        Panel(
            f"{title}, {number} of {len(shares)}" if len(shares) > 1 else title,
            "mean over samples",
            {f"{PREFIX}{name}": name for name in share},
        )
        for number, share in enumerate(shares, start=1)
    ]


def draw_panel(axes: Axes, panel: Panel, steps: Array, records: Sequence[StepRecord]) -> None:
    """Draw one panel."""
    for number, (name, label) in enumerate(panel.curves.items()):
        values, color = metric_of(records, name), _COLORS[number % len(_COLORS)]
        if panel.sparse:
            given = np.isfinite(values)
            axes.plot(steps[given], values[given], color=color, marker="o", ms=4, lw=1, ls="--", label=label)
        else:
            draw_line(axes, steps, values, color, label)
    axes.set(ylabel=panel.unit)
    axes.set_title(panel.title, fontsize="medium")
    axes.legend(fontsize="x-small", loc="best", framealpha=0.7)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
