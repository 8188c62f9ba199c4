"""Fields that may change after a job was created, each with its reason: the API server, a resumed run and the
documentation take them from here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Effect(StrEnum):
    """Effects of a change on what a resumed run computes."""

    NONE = "none"
    """Samples and weights stay the same, bit for bit."""
    WAY_ON = "some samples"
    """Samples whose reward failed, or rows that are left out, are others; the records say from which step on."""
    ROUNDING = "rounding"
    """Sums are added up in another order: bits may differ from the step on that the records mark."""


@dataclass(frozen=True, slots=True)
class Change:
    """A field that may change.

    Attributes:
        path: below `spec`; with it all that is below it.
        reason: why the change is harmless.
        effect: on what is computed.
        any_time: whether it may change while the job holds devices.
    """

    path: str
    reason: str
    effect: Effect = Effect.NONE
    any_time: bool = False


_TOGETHER = "how much is generated together"
_SAME_SUMS = "how a step's work is cut into pieces; the same sums in another order"

CHANGES: tuple[Change, ...] = (
    Change("steps", "more or fewer steps of the same run", any_time=True),
    Change("checkpoint", "when and how many are saved; but not `path`, which the run is found by", any_time=True),
    Change("failurePolicy", "what is done about a failed attempt, and how often", any_time=True),
    Change("suspend", "whether the job holds devices", any_time=True),
    Change("activeDeadlineSeconds", "how long the job may take", any_time=True),
    Change("ttlSecondsAfterFinished", "what is done after the job's end", any_time=True),
    Change("image", "the same job by another build of the worker"),
    Change("evaluation", "held-out prompts, which nothing is learned from"),
    Change("earlyStop", "when the run is done"),
    Change("timeouts", "how long is waited"),
    Change("records", "what is written about steps, trackers among it"),
    Change("scheduling", "where and when pods run"),
    Change("pods", "how pods are made"),
    Change("environment", "variables of the processes"),
    Change("network", "how pods reach one another"),
    Change("weightSync", "the way of the weights, which arrive bit for bit, and how that is checked"),
    Change("storage.sharedMemory", "the size of /dev/shm"),
    Change("resources.head", "the head pod's memory and processors"),
    Change("resources.worker", "the worker pods' memory and processors"),
    Change("memorySaver.releaseProcessGroups", "what memory sleeping trainers give back"),
    Change("hccl.connectTimeoutSeconds", "how long is waited"),
    Change("hccl.execTimeoutSeconds", "how long is waited"),
    Change("reward.timeoutSeconds", "how long a reward may take; a call that ends in time scores the same"),
    Change("reward.memory", "the memory that a reward may use; one that has enough scores the same"),
    Change("reward.onError", "what is done with a sample whose reward fails", Effect.WAY_ON),
    Change("reward.errorScore", "the score of a sample whose reward failed", Effect.WAY_ON),
    Change("data.skip", "rows that are left out from here on", Effect.WAY_ON),
    Change("rollout.kvCacheBytes", _TOGETHER, Effect.ROUNDING),
    Change("rollout.memoryFraction", _TOGETHER, Effect.ROUNDING),
    Change("rollout.maxNumSeqs", _TOGETHER, Effect.ROUNDING),
    Change("rollout.maxBatchedTokens", _TOGETHER, Effect.ROUNDING),
    Change("rollout.prefixCaching", "whether a prompt's beginning is computed once or anew", Effect.ROUNDING),
    Change("rollout.graphMode", "how an engine runs the same operations", Effect.ROUNDING),
    Change("training.maxTokensPerMicroBatch", _SAME_SUMS, Effect.ROUNDING),
    Change("training.recompute", "activations are kept or computed again", Effect.ROUNDING),
    Change("memorySaver.trainMemoryMargin", "the memory that must stay free beside the rest", Effect.ROUNDING),
    Change("resources.threadsPerDevice", _SAME_SUMS, Effect.ROUNDING),
)

MUTABLE_FIELDS = tuple(change.path for change in CHANGES if change.any_time)
"""Fields of `spec` that may change at any time; `checkpoint.path`, which the run folder follows from, as the others."""
RESUMABLE_FIELDS = tuple(change.path for change in CHANGES if not change.any_time)
"""Fields of `spec` that may change while the job holds no devices."""


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """The fields of `CHANGES` in which two specs, as JSON with all defaults, differ."""
    for change in CHANGES:
        if _at(old, change.path) != _at(new, change.path):
            yield change


def without_changeable(spec: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A spec, as JSON, without the fields that may change."""
    kept: dict[str, Any] = {}
    for name, value in spec.items():
        here = f"{path}.{name}" if path else name
        if here in _PATHS:
            continue
        below = any(known.startswith(f"{here}.") for known in _PATHS)
        kept[name] = without_changeable(value, here) if below and isinstance(value, dict) else value
    return kept


_PATHS = frozenset(change.path for change in CHANGES)


def _at(spec: Mapping[str, Any], path: str) -> Any:
    value: Any = spec
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
