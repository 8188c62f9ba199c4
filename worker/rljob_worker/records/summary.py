"""`summary.json`: how a run ended, and the statistics of its phases."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from rljob_worker.records.steps import effective_steps


def percentile(values: list[float], share: float) -> float:
    """Linear interpolation between closest ranks."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def phase_table(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per phase in order of appearance: seconds in total, median and p95 over the steps that had it, share of all."""
    names = list(dict.fromkeys(name for record in records for name in [*record["phases"], "other"]))
    names.remove("other")
    total = sum(record["step_seconds"] for record in records) or 1.0
    table = []
    for name in [*names, "other"]:
        values = [record["other"] if name == "other" else record["phases"].get(name) for record in records]
        seconds = [value for value in values if value is not None]
        table.append(
            {
                "phase": name,
                "steps": len(seconds),
                "median": statistics.median(seconds),
                "p95": percentile(seconds, 0.95),
                "total": sum(seconds),
                "share": sum(seconds) / total,
            }
        )
    return table


def summarize(records: list[dict[str, Any]], outcome: str, message: str, attempt: int) -> dict[str, Any]:
    """The content of `summary.json`.

    Args:
        records: all step records of the run, re-run steps included.
        outcome: `Succeeded`, `Stopped` or `Failed`.
        message: one sentence.
        attempt: the attempt that ended.
    """
    kept = effective_steps(records)
    rewards = [record["metrics"]["rollout/raw_reward"] for record in kept]
    return {
        "outcome": outcome,
        "message": message,
        "attempt": attempt,
        "steps": kept[-1]["step"] if kept else 0,
        "executed_steps": len(records),
        "lost_steps": len(records) - len(kept),
        "lost_seconds": sum(record["step_seconds"] for record in records)
        - sum(record["step_seconds"] for record in kept),
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "step_seconds_median": statistics.median(r["step_seconds"] for r in kept) if kept else None,
        "switch_seconds_median": statistics.median(r["switch_seconds"] for r in kept) if kept else None,
        "phases": phase_table(kept) if kept else [],
    }


def write_summary(run_folder: Path, summary: dict[str, Any]) -> Path:
    """Write it whole or not at all."""
    path = run_folder / "summary.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(summary, indent=1))
    temporary.replace(path)
    return path
