"""`summary.json`: how a run ended, and the statistics of its phases."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljob_api.phases import PHASES
from rljob_api.wire.run_status import SUMMARY_FILE, PhaseSummary, RunOutcome, RunSummary
from rljob_api.wire.step_record import StepRecord
from rljob_worker.host.files import write_whole
from rljob_worker.host.sealed_json import sealed
from rljob_worker.records.steps import effective_steps


def percentile(values: list[float], share: float) -> float:
    """Linear interpolation between closest ranks."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def phase_table(records: Sequence[StepRecord]) -> list[PhaseSummary]:
    """Per phase in the loop's order, `other` last: seconds in total, median and p95 over the steps that had it.

    `share` is of all steps' seconds; the shares of all rows sum to 1. The phases of a lane beside the trainers' follow
    as `LANE: PHASE`, and theirs sum to 1 too.
    """
    if not records:
        return []
    total = sum(record.step_seconds for record in records)
    table = _rows("", [(record.phases, record.other) for record in records], total)
    for lane in dict.fromkeys(name for record in records for name in record.lanes):
        of_lane = [(record.lanes[lane], record.lane_other(lane)) for record in records if lane in record.lanes]
        table += _rows(f"{lane}: ", of_lane, total)
    return table


def _rows(before: str, steps: Sequence[tuple[Mapping[str, float], float]], total: float) -> list[PhaseSummary]:
    """The rows of one lane, from the phases and what is left of each step."""
    had = {name for phases, _ in steps for name in phases}
    names = [name for name in PHASES if name in had] + sorted(had.difference(PHASES))
    table = [_row(before + name, [phases[name] for phases, _ in steps if name in phases], total) for name in names]
    return [*table, _row(f"{before}other", [other for _, other in steps], total)]


def _row(name: str, seconds: list[float], total: float) -> PhaseSummary:
    return PhaseSummary(
        phase=name,
        steps=len(seconds),
        median=statistics.median(seconds),
        p95=percentile(seconds, 0.95),
        total=sum(seconds),
        share=sum(seconds) / total if total else 0.0,
    )


def summarize(
    records: Sequence[StepRecord],
    outcome: RunOutcome,
    message: str,
    attempt: int,
    skipped_prompts: Mapping[str, int] | None = None,
    write_failures: Mapping[str, int] | None = None,
) -> RunSummary:
    """The content of `summary.json`.

    Args:
        records: all records of the run, re-run steps included.
        outcome: how it ended.
        message: one sentence.
        attempt: the attempt that ended.
        skipped_prompts: rows that were left out, by source.
        write_failures: how often it could not write what it can go on without, by what it was.
    """
    kept = [record for record in effective_steps(records) if record.is_step]
    records = [record for record in records if record.is_step]
    return RunSummary(
        outcome=outcome,
        message=message,
        attempt=attempt,
        steps=next((record.step for record in reversed(kept) if record.applied), 0),
        executed_steps=len(records),
        lost_steps=len(records) - len(kept),
        lost_seconds=sum(record.step_seconds for record in records) - sum(record.step_seconds for record in kept),
        reward_first=kept[0].reward if kept else None,
        reward_last=kept[-1].reward if kept else None,
        step_seconds_median=statistics.median(r.step_seconds for r in kept) if kept else None,
        switch_seconds_median=statistics.median(r.switch_seconds for r in kept) if kept else None,
        phases=phase_table(kept),
        skipped_prompts=skipped_prompts or {},
        write_failures=write_failures or {},
    )


def write_summary(run_folder: Path, summary: RunSummary) -> Path:
    """Write it whole or not at all."""
    path = run_folder / SUMMARY_FILE
    write_whole(path, sealed(summary.to_json(), indent=1))
    return path
