"""Observers of a running job: profiles of steps, trackers, collectors of traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob_api import derived
from rljob_api.how_many import how_many
from rljob_api.rules.findings import Check, Finding, address_fault
from rljob_api.spec import OtlpSpec, RLJobSpec, TrackerSpec
from rljob_api.step_metrics import is_step_metric, like_it

_OVER_HTTP = ("wandb", "clearml", "swanlab")
"""Trackers whose servers have no other address."""


_NOT_IN_PROJECTS = "/\\#?%:"


def _profile(spec: Any) -> Iterator[Finding]:
    """Processes and steps that a job does not have."""
    profile, at = spec.records.profile, ("records", "profile")
    if profile is None:
        return
    most = derived.engine_node_bounds(spec)[1] * derived.engines_per_node(spec)
    for field, numbers, count in (("ranks", profile.ranks, derived.trainers(spec)), ("engines", profile.engines, most)):
        for i, number in enumerate(numbers):
            # The default names the first, which every job has.
            if number and number >= count:
                yield Finding((*at, field, i), f"is none of the job's, which has {count}", f"0 to {count - 1}")
    if not profile.ranks and not profile.engines:
        yield Finding(at, "names neither ranks nor engines", "one of either at least")
    if profile.first_step > spec.steps:
        yield Finding(
            (*at, "firstStep"), f"is behind the last of the job's {how_many(spec.steps, 'step')}", f"1 to {spec.steps}"
        )


def _metrics(spec: Any) -> Iterator[Finding]:
    """Metrics that no record of the job will have."""
    named = (("earlyStop",), spec.early_stop), (("checkpoint", "keepBest"), spec.checkpoint.keep_best)
    for at, block in named:
        if block is None:
            continue
        if not is_step_metric(block.metric):
            near = ", ".join(like_it(block.metric)) or "rollout/raw_reward, eval/NAME and others"
            yield Finding((*at, "metric"), "is no metric of a step record", near)
        elif fault := _held_out(spec, block.metric):
            yield Finding((*at, "metric"), *fault)
    if spec.early_stop is not None and spec.early_stop.after_step >= spec.steps:
        wrong = f"is no step before the last of the job's {spec.steps}"
        without = "or no early stop: --set spec.earlyStop=null"
        yield Finding(("earlyStop", "afterStep"), wrong, f"0 to {spec.steps - 1}, {without}")


def _held_out(spec: Any, metric: str) -> tuple[str, str] | None:
    """Fault of a metric of an evaluation, and what would be right, where its sets have names of their own."""
    if not metric.startswith("eval/") or spec.evaluation is None or not spec.evaluation.sets:
        return None
    _, name, *of = metric.split("/", 2)
    known = {one.name: one.pass_at or spec.evaluation.pass_at for one in spec.evaluation.sets}
    if name not in known:
        return "is of no set of the evaluation", ", ".join(f"eval/{one}" for one in known)
    measured = ["truncated_ratio", *(f"pass@{k}" for k in known[name])]
    if of and of[0] not in measured:
        return "is not measured of this set", ", ".join((f"eval/{name}", *(f"eval/{name}/{one}" for one in measured)))
    return None


def _endpoint(otlp: Any) -> Iterator[Finding]:
    if wrong := address_fault(otlp.endpoint):
        yield Finding(("endpoint",), wrong, "like http://collector:4318")


def _tracker(tracker: Any) -> Iterator[Finding]:
    if tracker.name == "wandb" and (found := sorted(set(tracker.project) & set(_NOT_IN_PROJECTS))):
        yield Finding(("project",), f"holds {found[0]!r}, which W&B takes in no project's name", "without it")
    if tracker.url is None:
        return
    if tracker.name in _OVER_HTTP and not tracker.url.lower().startswith(("http://", "https://")):
        yield Finding(("url",), f"is no address that {tracker.name} can reach", "one with http:// or https://")
    elif tracker.url.lower().startswith("http") and (wrong := address_fault(tracker.url)):
        yield Finding(("url",), wrong, "like https://server.example:8080")


OBSERVED_CHECKS: dict[type, tuple[Check, ...]] = {
    RLJobSpec: (_profile, _metrics),
    OtlpSpec: (_endpoint,),
    TrackerSpec: (_tracker,),
}
