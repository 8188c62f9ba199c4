"""Every Prometheus metric family of the project: names, help, labels and buckets, for driver and operator alike.

The driver exports `JOB_METRICS` of its own job; the operator exports `JOB_METRICS` and `LIFECYCLE_METRICS` of every job
with the labels `namespace` and `rljob` in front, and `OPERATOR_METRICS` of itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Prometheus metric types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


SECONDS_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0
)  # fmt: skip
"""From a switch on one machine (10 ms) to a long rollout (1 h)."""
OPERATOR_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""For what the operator itself does."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family, without the labels that say which job it is about."""

    name: str
    """Without the `_total` of counters."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = "1"
    """`1` for what has none."""
    buckets: tuple[float, ...] = SECONDS_BUCKETS
    """Upper bounds; of histograms only."""

    @property
    def exposed_name(self) -> str:
        """The name as it stands in the text format."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


JOB_LABELS = ("namespace", "rljob")
"""Labels that the operator puts before those of every family about a job."""

PHASE_SECONDS = Metric(
    "rljob_phase_seconds",
    Kind.HISTOGRAM,
    "Wall-clock seconds of each phase of each executed step; phases are disjoint and sum, with `other`, to the step.",
    ("phase",),
    "seconds",
)
LANE_PHASE_SECONDS = Metric(
    "rljob_lane_phase_seconds",
    Kind.HISTOGRAM,
    "As `rljob_phase_seconds`, in each lane beside the trainers' (`engine`), where engines have devices of their own.",
    ("lane", "phase"),
    "seconds",
)
STEP_SECONDS = Metric("rljob_step_seconds", Kind.HISTOGRAM, "Wall-clock seconds of each executed step.", unit="seconds")
STEP = Metric("rljob_step", Kind.GAUGE, "Last completed step.", unit="steps")
TARGET_STEPS = Metric("rljob_target_steps", Kind.GAUGE, "Steps that the job will run.", unit="steps")
REWARD_MEAN = Metric("rljob_reward_mean", Kind.GAUGE, "Mean raw reward of the last step.")
REWARD_PART = Metric(
    "rljob_reward_part",
    Kind.GAUGE,
    "Mean of each named part of the reward in the last step, over the samples that have it.",
    ("part",),
)
REWARD_PARTS_LEFT_OUT = Metric(
    "rljob_reward_parts_left_out",
    Kind.GAUGE,
    "Names of reward parts in the last step that have no series: more than 32, or not fit to be a label.",
)
RESPONSE_LENGTH = Metric(
    "rljob_response_length_mean", Kind.GAUGE, "Mean length of the last step's responses.", unit="tokens"
)
SYNC_BYTES = Metric("rljob_weights_sync_bytes", Kind.GAUGE, "Bytes handed over by the last weight sync.", unit="bytes")
LOGPROB_ABS_DIFF = Metric(
    "rljob_logprob_abs_diff",
    Kind.GAUGE,
    "Mean absolute difference between the trainer's and the engine's log-probabilities in the last step.",
    unit="nats",
)
MEMORY_BYTES = Metric(
    "rljob_device_memory_bytes",
    Kind.GAUGE,
    "Memory of each process at the end of its last transition, by state.",
    ("process", "rank", "state"),
    "bytes",
)
ENVIRONMENT_FAILURES = Metric(
    "rljob_environment_failures",
    Kind.COUNTER,
    "What went wrong with environments, by class: infra (their process died, was late or over a bound), data (a reset "
    "or step raised, or gave what is no answer), replay (made anew, one answered otherwise), policy (no valid action).",
    ("class",),
)
LOST_STEPS = Metric(
    "rljob_lost_steps", Kind.COUNTER, "Executed steps that were run again after a restart.", unit="steps"
)

CHECKPOINT_FALLBACKS = Metric(
    "rljob_checkpoint_fallbacks",
    Kind.COUNTER,
    "Damaged checkpoints that were set aside by name, so that the one before was used.",
)
WRITE_FAILURES = Metric(
    "rljob_write_failures",
    Kind.COUNTER,
    "Writes to the run folder that this driver went on without: step records and events, which wait, trajectories, ...",
    ("what",),
)

JOB_METRICS = (
    PHASE_SECONDS,
    LANE_PHASE_SECONDS,
    STEP_SECONDS,
    STEP,
    TARGET_STEPS,
    REWARD_MEAN,
    REWARD_PART,
    REWARD_PARTS_LEFT_OUT,
    RESPONSE_LENGTH,
    SYNC_BYTES,
    LOGPROB_ABS_DIFF,
    MEMORY_BYTES,
    ENVIRONMENT_FAILURES,
    LOST_STEPS,
)
"""Metrics from the step records of a job."""

STATUS_PHASE = Metric(
    "rljob_status_phase",
    Kind.GAUGE,
    "1 for the phase of the job's life cycle that its status shows (Pending, Queued, Starting, Running, ...).",
    ("phase",),
)
CONDITION = Metric(
    "rljob_condition",
    Kind.GAUGE,
    "1 for the status (True, False, Unknown) that each of the job's conditions has now.",
    ("type", "status"),
)
RESTARTS = Metric("rljob_restarts", Kind.COUNTER, "Attempts that failed and were followed by another.", ("reason",))
VERIFICATION_FAILURES = Metric(
    "rljob_weights_verification_failures",
    Kind.COUNTER,
    "Weight hand-overs that failed or were found wrong, by where it is seen: `attempt` (it ended for that), `record`.",
    ("source",),
)
DEVICES = Metric("rljob_devices", Kind.GAUGE, "Devices that the job asks for.", unit="devices")
ENGINE_NODES = Metric(
    "rljob_engine_nodes",
    Kind.GAUGE,
    "Nodes for engines, where their number may change while the job runs: wanted (`resources.rollout.nodes`), "
    "taking_part (their engines generate).",
    ("state",),
    "nodes",
)
GOODPUT = Metric(
    "rljob_goodput_device_seconds",
    Kind.GAUGE,
    "Where the job's time went, times its devices: queued, starting, useful (steps that count), lost (steps that were "
    "run again), overhead (running, but in no step).",
    ("state",),
    "device-seconds",
)
LAST_PROGRESS = Metric(
    "rljob_last_progress_timestamp_seconds",
    Kind.GAUGE,
    "When the last step ended, or when the job began to run if that was later.",
    unit="Unix seconds",
)

LIFECYCLE_METRICS = (
    STATUS_PHASE,
    CONDITION,
    RESTARTS,
    VERIFICATION_FAILURES,
    DEVICES,
    ENGINE_NODES,
    GOODPUT,
    LAST_PROGRESS,
)
"""Metrics from the status of a job; only the operator has them."""

RECONCILE_SECONDS = Metric(
    "rljob_operator_reconcile_seconds",
    Kind.HISTOGRAM,
    "Seconds to look at one job and carry out what follows, by result.",
    ("result",),
    "seconds",
    OPERATOR_BUCKETS,
)
QUEUE_DEPTH = Metric("rljob_operator_queue_depth", Kind.GAUGE, "Jobs that wait to be looked at.", unit="jobs")
API_REQUESTS = Metric(
    "rljob_operator_api_requests",
    Kind.COUNTER,
    "Requests to the API server, by method and status code (or: timeout, disconnected).",
    ("method", "code"),
)
WRITES = Metric("rljob_operator_writes", Kind.COUNTER, "Objects written, by kind; Events not counted.", ("kind",))
WATCH_AGE = Metric(
    "rljob_operator_watch_age_seconds",
    Kind.GAUGE,
    "Seconds since a watch was last heard of.",
    ("resource",),
    "seconds",
)
WATCH_RESTARTS = Metric(
    "rljob_operator_watch_restarts",
    Kind.COUNTER,
    "Watches that were opened again, by what ended the one before.",
    ("resource", "cause"),
)
CACHED_OBJECTS = Metric("rljob_operator_cached_objects", Kind.GAUGE, "Objects in the caches.", ("resource",), "objects")
EVENTS_DROPPED = Metric(
    "rljob_operator_events_dropped",
    Kind.COUNTER,
    "Kubernetes Events that were not sent, by cause: rate, queue, error.",
    ("cause",),
)
RECORD_ERRORS = Metric(
    "rljob_operator_record_errors",
    Kind.COUNTER,
    "Looks at a job whose step records could not be read or counted, by cause: answer, content, time.",
    ("cause",),
)
LEADER = Metric("rljob_operator_leader", Kind.GAUGE, "1 while this replica acts.")

OPERATOR_METRICS = (
    RECONCILE_SECONDS,
    QUEUE_DEPTH,
    API_REQUESTS,
    WRITES,
    WATCH_AGE,
    WATCH_RESTARTS,
    CACHED_OBJECTS,
    EVENTS_DROPPED,
    RECORD_ERRORS,
    LEADER,
)
"""Metrics of the operator itself."""

DRIVER_METRICS = (CHECKPOINT_FALLBACKS, WRITE_FAILURES)
"""Metrics that only the driver has of its job."""

ALL_METRICS = (*JOB_METRICS, *DRIVER_METRICS, *LIFECYCLE_METRICS, *OPERATOR_METRICS)

REWARD_KEY = "rollout/raw_reward"
REWARD_STD_KEY = "rollout/raw_reward_std"
REWARD_MIN_KEY = "rollout/raw_reward_min"
REWARD_MAX_KEY = "rollout/raw_reward_max"
RESPONSE_TOKENS_KEY = "rollout/response_tokens"
RESPONSE_LENGTH_KEY = "rollout/response_len/mean"
ROLLOUT_TAIL_KEY = "perf/rollout_tail_share"
ENVIRONMENT_FAILURE_KEYS = {
    "infra": "rollout/episodes/failures/infra",
    "data": "rollout/episodes/failures/data",
    "replay": "rollout/episodes/failures/replay",
    "policy": "rollout/episodes/invalid_actions",
}
"""Class of `ENVIRONMENT_FAILURES` -> how many there were in a step."""
LOGPROB_KEY = "train/train_rollout_logprob_abs_diff"
LORA_LOST_KEY = "train/lora_change_lost"
LOGPROB_MAX_KEY = "train/train_rollout_logprob_abs_diff_max"
"""Entries of a step record's `metrics` block."""

MEMORY_STATES = {
    "free": "free",
    "used": "used",
    "paused": "paused",
    "backup": "backup",
    "arena_resident": "arena_resident",
    "process_resident": "resident",
    "resident_bytes": "resident",
}
"""Field of a memory report -> `state` label. What a transition moved is a flow and no state: it stays in the record."""

_PROCESS = re.compile(r"(trainer|engine|judge)-([0-9]{1,6})", re.ASCII)


def memory_states(memory: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    """(process, rank, state, bytes) of a record's `memory` block; the later phases of a process come later.

    `trainer-3` is process `trainer` of rank `3`; what has another name is no process of a job and left out.
    """
    for name, phases in memory.items():
        match = _PROCESS.fullmatch(name)
        if match is None:
            continue
        for report in phases.values():
            for field, value in report.items():
                if field in MEMORY_STATES and value is not None:
                    yield match[1], match[2], MEMORY_STATES[field], value
