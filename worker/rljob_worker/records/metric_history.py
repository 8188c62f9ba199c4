"""A metric over the steps: where it was best, and when it stopped getting better."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping, Sequence

from rljob_api.spec import EarlyStopSpec, MetricMode
from rljob_api.wire.step_record import StepRecord
from rljob_worker.records.steps import effective_steps

logger = logging.getLogger(__name__)

_EVALUATION = "eval/"
"""Begins the names of metrics that not every step has."""


def values_of(records: Sequence[StepRecord], metric: str) -> dict[int, float]:
    """Values of a metric by step; of a step that was run again, the one that counts."""
    found = {record.step: record.metric(metric) for record in effective_steps(records) if record.applied}
    return {step: value for step, value in found.items() if value is not None}


def best_step(values: Mapping[int, float], mode: MetricMode, steps: Collection[int]) -> int | None:
    """The one of some steps with the best value, the earliest of several; None: none of them has one."""
    measured = sorted(step for step in steps if step in values)
    return max(measured, key=lambda step: _score(values[step], mode), default=None)


def end_of_progress(values: Mapping[int, float], spec: EarlyStopSpec) -> str:
    """Why a run ends early, in words; empty while it goes on.

    Args:
        values: of `spec.metric` by step; one that is better than the best before by more than `minChange` is progress.
        spec: what ends a run.
    """
    steps = sorted(step for step in values if step >= spec.after_step)
    best, since = None, 0
    for step in steps:
        if best is None or _score(values[step], spec.mode) > _score(values[best], spec.mode) + spec.min_change:
            best, since = step, 0
        else:
            since += 1
    if best is None or since < spec.patience:
        return ""
    better = "above" if spec.mode is MetricMode.MAX else "below"
    margin = f" by more than {spec.min_change:g}" if spec.min_change else ""
    return f"no value of {spec.metric} in the last {since} was {better} {values[best]:.6g}{margin}, that of step {best}"


def _score(value: float, mode: MetricMode) -> float:
    return value if mode is MetricMode.MAX else -value


class EarlyStop:
    """Follows the metric of `spec.earlyStop`.

    Args:
        spec: None: nothing ends the run.
        records: of earlier attempts.
    """

    def __init__(self, spec: EarlyStopSpec | None, records: Sequence[StepRecord]) -> None:
        self._spec = spec
        self._values = values_of(records, spec.metric) if spec is not None else {}

    def continue_after(self, step: int) -> None:
        """Forget what was measured later: a run continues after this step."""
        self._values = {known: value for known, value in self._values.items() if known <= step}

    def reason(self) -> str:
        """Why the run ends now; empty: it goes on."""
        return "" if self._spec is None else end_of_progress(self._values, self._spec)

    def __call__(self, record: StepRecord) -> str:
        """`reason` with this record, which is about to be written."""
        if self._spec is None or not record.applied:
            return ""
        self.continue_after(record.step - 1)
        value = record.metric(self._spec.metric)
        if value is not None:
            self._values[record.step] = value
        return self.reason()


def name_unknown_metric(field: str, metric: str, record: StepRecord) -> None:
    """Warn of a metric that a run's first record does not have, so that a slip of the keyboard is seen."""
    if metric in record.metrics or metric.startswith(_EVALUATION):
        return
    near = ", ".join(difflib.get_close_matches(metric, record.metrics, n=3) or sorted(record.metrics))
    wrong = f"step {record.step} has no metric {metric}, so that it is without effect; there is {near}"
    logger.warning("%s: %s", field, wrong)
