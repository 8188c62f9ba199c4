"""Settings that a job has no use for, most of them since only steps behind its last would come to them.

A manifest that is tried for a few steps has them too: they are said, and nothing is refused for them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api import derived
from rljob_api.base import ApiModel
from rljob_api.how_many import how_many
from rljob_api.spec import LrSchedule, RLJobSpec

_LEAST_SECONDS = 30


def beyond_the_job(spec: RLJobSpec) -> Iterator[str]:
    """A sentence for each, with its path, its value and what the job has."""
    yield from _learning_rates(spec)
    yield from _ends(spec)
    yield from _teacher(spec)
    for place, block, name, why in (
        ("weightSync.probeEverySteps", spec.weight_sync, "probe_every_steps", "no step is probed"),
        ("records.trajectoriesEverySteps", spec.records, "trajectories_every_steps", "no trajectory is kept"),
        *(
            (f"records.trackers[{i}].samplesEverySteps", one, "samples_every_steps", "no samples are sent")
            for i, one in enumerate(spec.records.trackers)
        ),
    ):
        steps: int = getattr(block, name)
        if steps > spec.steps and not _is_default(block, name):
            yield f"spec.{place}: {steps} is more than the job's {how_many(spec.steps, 'step')}: {why}"


def _ends(spec: RLJobSpec) -> Iterator[str]:
    """An early stop that comes too late, a profile that is cut short, a job that ends before it began."""
    stop, profile, seconds = spec.early_stop, spec.records.profile, spec.active_deadline_seconds
    if stop is not None and not _is_default(stop, "patience") and stop.patience > spec.steps - max(stop.after_step, 1):
        have = how_many(spec.steps, "step has", "steps have")
        yield f"spec.earlyStop.patience: {stop.patience} is more values than the job's {have}"
    if profile is not None and profile.first_step <= spec.steps < (last := profile.first_step + profile.steps - 1):
        first = profile.first_step
        yield f"spec.records.profile.steps: {first} to {last} are asked for, and the job ends with step {spec.steps}"
    if seconds is not None and seconds < _LEAST_SECONDS:
        yield f"spec.activeDeadlineSeconds: in {seconds} s hardly a job's processes have started"


def _teacher(spec: RLJobSpec) -> Iterator[str]:
    distill = spec.algorithm.distill
    if distill is not None and distill.reward_weight == 0 and distill.teacher.path == spec.model.path:
        yield (
            "spec.algorithm.distill.teacher.path: is model.path too, from which the policy does not differ at first: "
            "with rewardWeight 0 it has nothing to learn"
        )


def _learning_rates(spec: RLJobSpec) -> Iterator[str]:
    optimizer, updates = spec.training.optimizer, derived.total_updates(spec)
    yield from _warm_up("training.optimizer", optimizer.warmup_steps, updates, optimizer.lr)
    decay = optimizer.decay_steps
    if optimizer.schedule != LrSchedule.CONSTANT and decay is not None and decay > updates:
        yield (
            f"spec.training.optimizer.decaySteps: {decay} is more than the job's {how_many(updates, 'update')}: the "
            f"learning rate never comes to minLr, {optimizer.min_lr:g}"
        )
    critic = derived.critic(spec)
    if critic is not None:
        own = critic.optimizer
        yield from _warm_up("critic.optimizer", own.warmup_steps, spec.steps * critic.updates_per_step, own.lr)


def _warm_up(place: str, steps: int, updates: int, rate: float) -> Iterator[str]:
    if steps > updates:
        yield (
            f"spec.{place}.warmupSteps: {steps} is more than the job's {how_many(updates, 'update')}: the learning "
            f"rate ends at {rate * updates / steps:.3g} and never comes to {rate:g}"
        )


def _is_default(block: ApiModel, name: str) -> bool:
    return bool(getattr(block, name) == type(block).model_fields[name].get_default())
