"""Rules about what runs a policy's programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob_api.quantities import to_number
from rljob_api.rewards import SANDBOX_SHARE
from rljob_api.rules.findings import Check, Finding
from rljob_api.spec import RLJobSpec, SandboxSpec

_LEAST_MEMORY = 2**26


def _limits(spec: Any) -> Iterator[Finding]:
    """Limits of programs that do not fit the rewards that run them."""
    sandbox = spec.sandbox or SandboxSpec()
    if to_number(sandbox.memory) < _LEAST_MEMORY:
        yield Finding(("sandbox", "memory"), "is too little for a program in Python", "at least 64Mi")
    runs_programs = False
    for reward in _whole_rewards(spec):
        if all(function.name != "code" for function in reward.parts or [reward]):
            continue
        runs_programs = True
        if sandbox.seconds > SANDBOX_SHARE * reward.timeout_seconds:
            wrong = f"is more than {SANDBOX_SHARE:.0%} of the reward's timeoutSeconds, in which all tests have to end"
            yield Finding(("sandbox", "seconds"), wrong, f"at most {SANDBOX_SHARE * reward.timeout_seconds:g}")
    if spec.sandbox is not None and not runs_programs:
        yield Finding(("sandbox",), "has no effect: no reward is called code", "leave it out")


def _whole_rewards(spec: Any) -> Iterator[Any]:
    evaluation = spec.evaluation
    held_out = [] if evaluation is None else [*([evaluation.data] if evaluation.data else []), *(evaluation.sets or [])]
    for source in [spec, *(spec.data.sources or [spec.data]), *held_out]:
        if source.reward is not None:
            yield source.reward


SANDBOX_CHECKS: dict[type, tuple[Check, ...]] = {RLJobSpec: (_limits,)}
