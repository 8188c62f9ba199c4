"""Collects what a step reports and writes its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rljob_api.phases import TRAINER_LANE
from rljob_api.wire.prompts_of_step import PromptsOfStep
from rljob_api.wire.step_record import Changed, RankSpans, StepRecord, WeightSync
from rljob_api.wire.values import finite
from rljob_worker.phases import StepTiming
from rljob_worker.records.rank_times import RankTime
from rljob_worker.records.steps import StepLog

_RANK_DIGITS = 5
"""Hundredths of a millisecond; clocks of several nodes differ by more."""
Sink = Callable[[StepRecord], None]
SampleSink = Callable[[int, Sequence[Mapping[str, Any]]], None]

ALWAYS_REPORTED = (
    "rollout/raw_reward",
    "rollout/response_len/mean",
    "rollout/truncated_ratio",
    "train/loss",
    "train/grad_norm",
    "train/entropy_loss",
    "train/kl_loss",
    "train/train_rollout_logprob_abs_diff",
)
"""Metrics that every record names; null where a job does not measure one (`train/kl_loss` without a reference)."""


class RecordWriter:
    """Gathers metrics, memory and sync reports between two `write` calls.

    Args:
        folder: the run folder.
        log: where records go.
        attempt: stamped on each record.
        sinks: called with each record after it was written (TensorBoard, metric registry, progress bar, trackers).
        on_samples: called with each step and its samples, as in the trajectories.
        early_stop: says of a record that is about to be written why the run ends with it.
    """

    def __init__(
        self,
        folder: Path,
        log: StepLog,
        attempt: int,
        sinks: list[Sink],
        on_samples: SampleSink | None = None,
        early_stop: Callable[[StepRecord], str] = lambda record: "",
    ) -> None:
        self.folder = folder
        self._early_stop = early_stop
        self._on_samples = on_samples
        self._log = log
        self._attempt = attempt
        self._sinks = sinks
        self._begin()

    def _begin(self) -> None:
        self._metrics: dict[str, float] = {}
        self._memory: dict[str, dict[str, Any]] = {}
        self._busy: dict[str, float] = {}
        self._overlapped: dict[str, float] = {}
        self._ranks: Sequence[RankTime] = ()
        self._weights: WeightSync | None = None
        self._prompts: PromptsOfStep | None = None
        self._changed: Changed | None = None

    def metrics(self, values: Mapping[str, float]) -> None:
        """Add scalars to the step."""
        self._metrics.update(values)

    def memory(self, phase: str, by_process: Mapping[str, Any]) -> None:
        """Bytes reported by each process at the end of a phase."""
        for process, report in by_process.items():
            if isinstance(report, dict):
                self._memory.setdefault(process, {})[phase] = report

    def busy(self, by_process: Mapping[str, float]) -> None:
        """Seconds that each process computed during the step."""
        self._busy.update(by_process)

    def ranks(self, times: Sequence[RankTime]) -> None:
        """When each process was at work."""
        self._ranks = times

    def overlapped(self, values: Mapping[str, float]) -> None:
        """Seconds of work that ran beside a phase."""
        self._overlapped.update(values)

    def weights(self, report: WeightSync) -> None:
        """Note the weight sync's report."""
        self._weights = report

    def prompts(self, prompts: PromptsOfStep) -> None:
        """Note the prompts that the step closed and left open."""
        self._prompts = prompts

    def changed(self, changed: Changed) -> None:
        """Note the changes by the resume: the next record has them."""
        self._changed = changed

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Pass on what a step's responses were."""
        if self._on_samples is not None:
            self._on_samples(step, samples)

    def write(self, step: int, timing: StepTiming, *, applied: bool = True) -> StepRecord:
        """Write the record of a step and begin the next one's; returns what stands in the log."""
        draft = replace(self.draft(step, timing), applied=applied)
        written = self._append(replace(draft, stopped_early=self._early_stop(draft)))
        self._begin()
        return written

    def write_evaluation_at_start(
        self,
        timing: StepTiming,
        metrics: Mapping[str, float],
        busy: Mapping[str, float],
        overlapped: Mapping[str, float],
        ranks: Sequence[RankTime] = (),
    ) -> None:
        """Write the record of step 0.

        What was gathered so far is the first step's: the first weight sync, for example.
        """
        record = RecordWriter(self.folder, self._log, self._attempt, self._sinks, early_stop=self._early_stop)
        record.metrics(metrics)
        record.busy(busy)
        record.overlapped(overlapped)
        record.ranks(ranks)
        record.write(0, timing)

    def recover(self, draft: StepRecord, metrics: Mapping[str, float]) -> None:
        """Write the record of a step whose checkpoint is complete but whose driver died before it could write it.

        Args:
            draft: as it was kept beside the checkpoint.
            metrics: what was measured since.
        """
        draft = replace(draft, recovered=True, metrics={**draft.metrics, **finite(metrics)})
        self._append(replace(draft, stopped_early=self._early_stop(draft)))

    def recover_written(self, records: Sequence[StepRecord]) -> None:
        """Write again those of earlier steps that a checkpoint kept and the log has lost."""
        for record in records:
            if not self._log.has(record.step, record.attempt):
                self._early_stop(record)
                self._append(replace(record, recovered=True))

    def not_on_disk(self) -> list[StepRecord]:
        """The records that a crash may still take: a checkpoint keeps them."""
        return self._log.not_on_disk()

    def has(self, step: int, attempt: int) -> bool:
        """Whether the record of a step of an attempt stands in the log."""
        return self._log.has(step, attempt)

    def draft(self, step: int, timing: StepTiming) -> StepRecord:
        """The record as far as it is known; metrics that JSON cannot hold are null."""
        lanes = [*timing.lanes.values(), timing.phases]
        perf = {f"perf/{name}_time": seconds for phases in lanes for name, seconds in phases.items()}
        if step:
            beside = {TRAINER_LANE: timing.phases, **timing.lanes} if timing.lanes else {}
            perf |= {f"perf/{lane}_bubble": timing.bubble(phases) for lane, phases in beside.items()}
            perf["perf/step_time"] = timing.step_seconds
            # slime's train_wait is everything outside training: it contains the other phases and must not be added to
            # them.
            training = ("values", "ref_log_probs", "teacher_log_probs", "log_probs", "critic_train", "actor_train")
            perf["perf/train_wait_time"] = timing.step_seconds - sum(timing.phases.get(name, 0.0) for name in training)
        now = time.time()
        return StepRecord(
            step=step,
            attempt=self._attempt,
            time=now,
            step_seconds=timing.step_seconds,
            phases=timing.phases,
            other=timing.other,
            switch_seconds=timing.switch,
            nested=("perf/train_wait_time",) if step else (),
            metrics=finite({**dict.fromkeys(ALWAYS_REPORTED), **self._metrics, **perf}),
            weights=self._weights,
            prompts=self._prompts,
            changed=self._changed,
            memory=self._memory,
            busy_seconds=self._busy,
            overlapped=self._overlapped,
            lanes=timing.lanes,
            ranks=_of_step(self._ranks, now - timing.step_seconds),
        )

    def _append(self, draft: StepRecord) -> StepRecord:
        written = self._log.append(draft)
        for sink in self._sinks:
            sink(written)
        return written


def _of_step(times: Sequence[RankTime], begin: float) -> RankSpans:
    """When each process was at work, in seconds since the step began."""
    spans: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for one in times:
        span = round(one.begin - begin, _RANK_DIGITS), round(one.end - begin, _RANK_DIGITS)
        spans.setdefault(one.process, {}).setdefault(one.what, []).append(span)
    return spans
