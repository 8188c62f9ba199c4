"""`summary.json`: how a run ended, and the statistics of its phases."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from rljob_api.phases import PHASES
from rljob_worker.records.run_files import write_whole
from rljob_worker.records.steps import effective_steps


def percentile(values: list[float], share: float) -> float:
    """Linear interpolation between closest ranks."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def phase_table(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per phase in the loop's order, `other` last: seconds in total, median and p95 over the steps that had it.

    `share` is of all steps' seconds; the shares of all rows sum to 1.
    """
    had = {name for record in records for name in record["phases"]}
    names = [name for name in PHASES if name in had] + sorted(had.difference(PHASES))
    total = sum(record["step_seconds"] for record in records)
    table = [_row(name, [r["phases"][name] for r in records if name in r["phases"]], total) for name in names]
    return [*table, _row("other", [record["other"] for record in records], total)] if records else []


def _row(name: str, seconds: list[float], total: float) -> dict[str, Any]:
    return {
        "phase": name,
        "steps": len(seconds),
        "median": statistics.median(seconds),
        "p95": percentile(seconds, 0.95),
        "total": sum(seconds),
        "share": sum(seconds) / total if total else 0.0,
    }


def summarize(records: list[dict[str, Any]], outcome: str, message: str, attempt: int) -> dict[str, Any]:
    """The content of `summary.json`.

    Args:
        records: all step records of the run, re-run steps included.
        outcome: `Succeeded`, `Stopped` or `Failed`.
        message: one sentence.
        attempt: the attempt that ended.
    """
    kept = effective_steps(records)
    rewards = [record["metrics"].get("rollout/raw_reward") for record in kept]
    return {
        "outcome": outcome,
        "message": message,
        "attempt": attempt,
        "steps": next((record["step"] for record in reversed(kept) if record.get("applied", True)), 0),
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
    write_whole(path, json.dumps(summary, indent=1))
    return path
