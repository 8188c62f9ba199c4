"""The table of phase seconds as text."""

from __future__ import annotations

import statistics
from pathlib import Path

from rljob_api.safe_text import visible_line
from rljob_worker.records.steps import effective_steps, read_steps
from rljob_worker.records.summary import percentile, phase_table


def phase_table_text(run_folder: Path) -> str:
    """Median, p95 and share of each phase over the run's steps, then the step and what of it was switching.

    Empty when no step was finished.
    """
    records = [record for record in effective_steps(read_steps(run_folder)) if record.is_step]
    if not records:
        return ""
    lines = [f"{'phase':<24}{'median':>11}{'p95':>11}{'share':>9}{'steps':>8}"]
    for row in phase_table(records):
        lines.append(_line(row.phase, row.median, row.p95, row.share, row.steps))
    lines.append("-" * len(lines[0]))
    total = sum(record.step_seconds for record in records)
    lines.append(_sum("step", [record.step_seconds for record in records], total))
    lines.append(_sum("of which switch", [record.switch_seconds for record in records], total))
    return "\n".join(lines)


def _sum(name: str, seconds: list[float], total: float) -> str:
    share = sum(seconds) / (total or 1.0)
    return _line(name, statistics.median(seconds), percentile(seconds, 0.95), share, len(seconds))


def _line(name: str, median: float, p95: float, share: float, steps: int) -> str:
    return f"{visible_line(name):<24}{median * 1000:>8.1f} ms{p95 * 1000:>8.1f} ms{share * 100:>8.1f}%{steps:>8d}"
