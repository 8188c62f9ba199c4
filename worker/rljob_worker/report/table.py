"""The table of phase seconds as text."""

from __future__ import annotations

from pathlib import Path

from rljob_worker.records.steps import effective_steps, read_steps
from rljob_worker.records.summary import phase_table


def phase_table_text(run_folder: Path) -> str:
    """Median, p95 and share of each phase over the run's steps, as aligned lines."""
    rows = phase_table(effective_steps(read_steps(run_folder)))
    lines = [f"{'phase':<22}{'median':>11}{'p95':>11}{'share':>9}{'steps':>8}"]
    for row in rows:
        lines.append(
            f"{row['phase']:<22}{row['median'] * 1000:>8.1f} ms{row['p95'] * 1000:>8.1f} ms"
            f"{row['share'] * 100:>8.1f}%{row['steps']:>8d}"
        )
    return "\n".join(lines)
