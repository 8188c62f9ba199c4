"""The metrics of a job: names, help, labels and buckets, for whoever exports them (driver and operator)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Prometheus metric types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family, without the labels that say which job it is about."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


SECONDS_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0
)  # fmt: skip
"""From a switch on one machine (10 ms) to a long rollout (1 h)."""

PHASE_SECONDS = Metric(
    "rljob_phase_seconds",
    Kind.HISTOGRAM,
    "Wall-clock seconds of each phase of each executed step; phases are disjoint and sum, with `other`, to the step.",
    ("phase",),
)
STEP_SECONDS = Metric("rljob_step_seconds", Kind.HISTOGRAM, "Wall-clock seconds of each executed step.")
STEP = Metric("rljob_step", Kind.GAUGE, "Last completed step.")
TARGET_STEPS = Metric("rljob_target_steps", Kind.GAUGE, "Steps that the job will run.")
REWARD_MEAN = Metric("rljob_reward_mean", Kind.GAUGE, "Mean raw reward of the last step.")
SYNC_BYTES = Metric("rljob_weights_sync_bytes", Kind.GAUGE, "Bytes handed over by the last weight sync.")
LOGPROB_ABS_DIFF = Metric(
    "rljob_logprob_abs_diff",
    Kind.GAUGE,
    "Mean absolute difference between the trainer's and the engine's log-probabilities in the last step.",
)
MEMORY_BYTES = Metric(
    "rljob_device_memory_bytes",
    Kind.GAUGE,
    "Memory of each process at the end of its last transition, by state.",
    ("process", "state"),
)
LOST_STEPS = Metric("rljob_lost_steps", Kind.COUNTER, "Executed steps that were run again after a restart.")

JOB_METRICS = (
    PHASE_SECONDS,
    STEP_SECONDS,
    STEP,
    TARGET_STEPS,
    REWARD_MEAN,
    SYNC_BYTES,
    LOGPROB_ABS_DIFF,
    MEMORY_BYTES,
    LOST_STEPS,
)
