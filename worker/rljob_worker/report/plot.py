"""The picture of a run: reward, where the time went, and whether trainer and engine agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from rljob_worker.phases import PHASES

_COLORS = dict(zip((*PHASES, "other"), plt.get_cmap("tab20").colors))  # type: ignore[attr-defined]
_MAX_BARS = 150


def plot_run(records: list[dict[str, Any]], title: str, path: Path) -> Path:
    """Draw the run's step records into a PNG file.

    Args:
        records: step records in order, each step once; at least one.
        title: heading.
        path: file to write.
    """
    figure, (reward, phases, difference) = plt.subplots(3, 1, figsize=(11, 12), layout="constrained")
    figure.suptitle(title)
    steps = np.array([record["step"] for record in records])
    _reward(reward, steps, records)
    _phases(phases, records)
    _difference(difference, steps, records)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _reward(axes: Axes, steps: np.ndarray, records: list[dict[str, Any]]) -> None:
    mean, spread = _metric(records, "rollout/raw_reward"), _metric(records, "rollout/raw_reward_std")
    axes.plot(steps, mean, color="tab:blue", label="mean reward")
    axes.fill_between(steps, mean - spread, mean + spread, alpha=0.15, color="tab:blue", label="one standard deviation")
    for name in sorted({n for r in records for n in r["metrics"] if n.startswith("eval/") and n.count("/") == 1}):
        axes.plot(steps, _metric(records, name), "o", label=name)
    axes.set(ylabel="reward", title="Reward of training samples")
    axes.legend(loc="best", fontsize="small")
    axes.grid(alpha=0.3)


def _phases(axes: Axes, records: list[dict[str, Any]]) -> None:
    """Stacked seconds; many steps are averaged into at most 150 bars so that each stays visible."""
    groups = np.array_split(np.arange(len(records)), min(len(records), _MAX_BARS))
    left = np.array([records[group[0]]["step"] for group in groups])
    width = np.array([len(group) for group in groups])
    bottom = np.zeros(len(groups))
    for name in (*PHASES, "other"):
        values = np.array([np.mean([_phase(records[i], name) for i in group]) for group in groups])
        if values.any():
            axes.bar(left, values, width, bottom, align="edge", color=_COLORS[name], label=name, linewidth=0)
            bottom += values
    axes.set(ylabel="seconds", title="Where each step's time went")
    axes.set_ylim(0, np.percentile(bottom, 99) * 1.15)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


def _difference(axes: Axes, steps: np.ndarray, records: list[dict[str, Any]]) -> None:
    for name, label in (
        ("train/train_rollout_logprob_abs_diff", "mean over tokens"),
        ("train/train_rollout_logprob_abs_diff_max", "largest token"),
    ):
        values = _metric(records, name)
        if np.isfinite(values).any():
            axes.plot(steps, values, label=label)
    axes.set(
        ylabel="|log p_train - log p_rollout|", xlabel="step", title="Trainer and engine: log-probability difference"
    )
    axes.set_yscale("log")
    axes.legend(loc="best", fontsize="small")
    axes.grid(alpha=0.3)


def _phase(record: dict[str, Any], name: str) -> float:
    return float(record["other"] if name == "other" else record["phases"].get(name, 0.0))


def _metric(records: list[dict[str, Any]], name: str) -> np.ndarray:
    values = [record["metrics"].get(name) for record in records]
    return np.array([np.nan if value is None else value for value in values], dtype=float)
