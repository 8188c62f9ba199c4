"""Rules about what devices, their drivers and vLLM's plugins for them cannot do."""

from __future__ import annotations

from collections.abc import Callable

from rljob_api.profiles import PROFILES, HardwareProfile
from rljob_api.rules.core import Rule
from rljob_api.spec import EnvironmentSpec, ResourcesSpec, RLJobSpec

_FORCING_NZ = ("VLLM_ASCEND_ENABLE_FUSED_MC2", "VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE")


def _names(chosen: Callable[[HardwareProfile], object]) -> list[str]:
    return [name for name, profile in PROFILES.items() if chosen(profile)]


def _on_one_of(names: list[str]) -> str:
    """CEL, in a job's spec: its profile is one of these."""
    listed = ", ".join(f"'{name}'" for name in names)
    if ResourcesSpec().profile.value in names:
        return f"!has(self.resources) || self.resources.profile in [{listed}]"
    return f"has(self.resources) && self.resources.profile in [{listed}]"


def _graph_rule() -> Rule:
    refusing = _names(lambda profile: not profile.captures_graphs)
    return Rule(
        on=RLJobSpec,
        field="rollout.graphMode",
        wrong="captured graphs would go on with weights of an earlier step, and torch_npu captures none with"
        " TASK_QUEUE_ENABLE=2",
        allowed=f"false on profiles {', '.join(refusing)}",
        check=lambda s: not s.rollout.graph_mode or PROFILES[s.resources.profile].captures_graphs,
        cel=f"!self.rollout.graphMode || !({_on_one_of(refusing)})",
    )


def _drafts_rule() -> Rule:
    refusing = _names(lambda profile: not profile.verifies_drafts)
    return Rule(
        on=RLJobSpec,
        field="rollout.speculative",
        wrong="vllm-ascend verifies guesses in a way of its own, with other tokens than without them",
        allowed=f"leave it out on profiles {', '.join(refusing)}",
        check=lambda s: s.rollout.speculative is None or PROFILES[s.resources.profile].verifies_drafts,
        cel=f"!has(self.rollout.speculative) || !({_on_one_of(refusing)})",
    )


def _experts_rule() -> Rule:
    refusing = _names(lambda profile: not profile.returns_experts)
    return Rule(
        on=RLJobSpec,
        field="rollout.routerReplay",
        wrong="vllm-ascend 0.23 may return where an expert is instead of which one it is (vllm-ascend 13882)",
        allowed=f"false on profiles {', '.join(refusing)}",
        check=lambda s: not s.rollout.router_replay or PROFILES[s.resources.profile].returns_experts,
        cel=f"!self.rollout.routerReplay || !({_on_one_of(refusing)})",
    )


def _engine_arg_rule(name: str) -> Rule:
    refusing = _names(lambda profile: name in profile.refused_engine_args)
    return Rule(
        on=RLJobSpec,
        field=f"rollout.engineArgs.{name}",
        wrong=PROFILES[refusing[0]].refused_engine_args[name],
        allowed=f"false, or leave it out, on profiles {', '.join(refusing)}",
        check=lambda s: (
            not s.rollout.engine_args.get(name) or name not in PROFILES[s.resources.profile].refused_engine_args
        ),
        cel=None,
    )


def _nz_rule(field: str) -> Rule:
    return Rule(
        on=EnvironmentSpec,
        field=field,
        wrong=f"{' and '.join(_FORCING_NZ)} need HCCL ports of their own and put weights into the NZ layout, which"
        " cannot be updated in place",
        allowed="neither of them, or 0",
        check=lambda e: all(getattr(e, field).get(name, "0") == "0" for name in _FORCING_NZ),
        cel=" && ".join(f"(!('{name}' in self.{field}) || self.{field}['{name}'] == '0')" for name in _FORCING_NZ),
    )


DEVICES = (
    _graph_rule(),
    _drafts_rule(),
    _experts_rule(),
    *(_engine_arg_rule(name) for name in sorted({arg for p in PROFILES.values() for arg in p.refused_engine_args})),
    _nz_rule("variables"),
    _nz_rule("rollout"),
)
