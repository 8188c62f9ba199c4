"""Deadlines that a longer one stands within: past the shorter one, the whole phase has failed before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob_api.derived import environments
from rljob_api.rules.findings import Check, Finding
from rljob_api.rules.places import parts_of, rewards_of
from rljob_api.spec import JudgeSpec, RewardSpec, RLJobSpec, TextEnvironmentSpec
from rljob_api.spec.sandbox import SandboxServiceSpec

_At = tuple[str | int, ...]


def _phase(spec: Any, name: str) -> tuple[float, str]:
    """Seconds of a phase, and the field that says so."""
    own = spec.timeouts.phases.get(name)
    return (
        (own, f"timeouts.phases.{name}") if own is not None else (spec.timeouts.phase_seconds, "timeouts.phaseSeconds")
    )


def _within(at: _At, value: float, default: float, limit: tuple[float, str]) -> Iterator[Finding]:
    # A default is no wish: who shortens the phase alone means all that is in it.
    if value != default and value > limit[0]:
        yield Finding(
            at, f"is more than the {limit[0]:g} s of {limit[1]}, past which the job has failed", f"at most {limit[0]:g}"
        )


def _deadlines(spec: Any) -> Iterator[Finding]:
    fields = TextEnvironmentSpec.model_fields
    for place, environment in environments(spec):
        limit = _phase(spec, "eval" if place.startswith("evaluation") else "rollout")
        for name, field in (("reset_seconds", "resetSeconds"), ("step_seconds", "stepSeconds")):
            at = (*parts_of(place), "environment", field)
            yield from _within(at, getattr(environment, name), fields[name].default, limit)
    for at, reward in rewards_of(spec):
        limit = _phase(spec, "eval" if at[0] == "evaluation" else "reward")
        default = RewardSpec.model_fields["timeout_seconds"].default
        yield from _within((*at, "timeoutSeconds"), reward.timeout_seconds, default, limit)
        start = (spec.timeouts.start_seconds, "timeouts.startSeconds")
        default = RewardSpec.model_fields["import_seconds"].default
        yield from _within((*at, "importSeconds"), reward.import_seconds, default, start)
    if spec.sandbox is not None and spec.sandbox.service is not None:
        default = SandboxServiceSpec.model_fields["wait_seconds"].default
        wait = spec.sandbox.service.wait_seconds
        # Samples are scored while others are still generated.
        longest = max(_phase(spec, "reward"), _phase(spec, "rollout"))
        yield from _within(("sandbox", "service", "waitSeconds"), wait, default, longest)
    for index, judge in enumerate(spec.judges):
        default = JudgeSpec.model_fields["timeout_seconds"].default
        yield from _within(("judges", index, "timeoutSeconds"), judge.timeout_seconds, default, _phase(spec, "reward"))


DEADLINE_CHECKS: dict[type, tuple[Check, ...]] = {RLJobSpec: (_deadlines,)}
