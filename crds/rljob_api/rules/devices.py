"""Rules about what devices, their drivers and vLLM's plugins for them cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rljob_api.profiles import PROFILES, HardwareProfile
from rljob_api.rules.core import Rule
from rljob_api.rules.findings import Check, Finding
from rljob_api.spec import EnvironmentSpec, ResourcesSpec, RLJobSpec

V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Variable that chooses one of vLLM's two model runners for an engine."""
_FORCING_NZ = ("VLLM_ASCEND_ENABLE_FUSED_MC2", "VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE")


def _names(chosen: Callable[[HardwareProfile], object]) -> list[str]:
    return [name for name, profile in PROFILES.items() if chosen(profile)]


def on_one_of(names: list[str]) -> str:
    """CEL, in a job's spec: its profile is one of these."""
    listed = ", ".join(f"'{name}'" for name in names)
    if ResourcesSpec().profile.value in names:
        return f"!has(self.resources) || self.resources.profile in [{listed}]"
    return f"has(self.resources) && self.resources.profile in [{listed}]"


def _unable_rule(able: str, used: Callable[[Any], bool], unused_cel: str, *, field: str, wrong: str, off: str) -> Rule:
    """A part of the spec that profiles refuse which are not `able` to do it; `off` is how it is left alone."""
    refusing = _names(lambda profile: not getattr(profile, able))
    return Rule(
        on=RLJobSpec,
        field=field,
        wrong=wrong,
        allowed=f"{off} on profiles {', '.join(refusing)}",
        check=lambda s: not used(s) or getattr(PROFILES[s.resources.profile], able),
        cel=f"{unused_cel} || !({on_one_of(refusing)})",
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


def _runner_rule(field: str) -> Rule:
    return Rule(
        on=EnvironmentSpec,
        field=field,
        wrong=f"{V2_RUNNER}: RLJob's sampling, router replay and sleep are made for vLLM's first model runner",
        allowed="leave it out, or 0",
        check=lambda e: getattr(e, field).get(V2_RUNNER, "0") == "0",
        cel=f"!('{V2_RUNNER}' in self.{field}) || self.{field}['{V2_RUNNER}'] == '0'",
    )


_ADDITIONAL = {
    **dict.fromkeys(
        ("weight_nz_mode", "enable_fused_mc2"), "must be 0, or left out: the engine could not take new weights"
    ),
    **dict.fromkeys(
        ("enable_reduce_sample", "enable_async_exponential"),
        "vllm-ascend's own way to draw tokens: RLJob draws them itself, so that a response does not depend on where it"
        " is made",
    ),
}
_MOVING = "vllm-ascend 0.23 loses the experts' places when the engine sleeps"


def _additional(spec: Any) -> Iterator[Finding]:
    """Settings of vllm-ascend that may not be given."""
    given = spec.rollout.engine_args.get("additional_config")
    if PROFILES[spec.resources.profile].kind != "npu" or not isinstance(given, dict):
        return
    at = ("rollout", "engineArgs", "additional_config")
    for name, value in given.items():
        if name in _ADDITIONAL and value:
            yield Finding((*at, name), _ADDITIONAL[name], "leave it out")
        elif name in ("eplb_config", "dynamic_eplb", "expert_map_path"):
            yield Finding((*at, name), _MOVING, "leave it out")


def _visible(spec: Any) -> Iterator[Finding]:
    """GPUs that processes see; where the CPU computes, hiding them does no harm."""
    if PROFILES[spec.resources.profile].kind != "cuda":
        return
    for place in ("variables", "trainer", "rollout"):
        for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
            if name in getattr(spec.environment, place):
                yield Finding(("environment", place, name), "Ray gives each process its devices", "leave it out")


_NO_CAPTURE = "no graph (rollout.graphMode) is captured with it"


def _graphs(spec: Any) -> Iterator[Finding]:
    """Settings with which torch_npu and vllm-ascend capture no graphs, or lose them."""
    if not spec.rollout.graph_mode or PROFILES[spec.resources.profile].kind != "npu":
        return
    queue = "0, 1, or leave it out: engines then have 1, trainers the profile's"
    # torch_npu, NPUGraph.cpp:155; vllm_ascend/platform.py.
    if spec.resources.tuning.task_queue_enable == 2:
        yield Finding(("resources", "tuning", "taskQueueEnable"), _NO_CAPTURE, queue)
    if spec.environment.rollout.get("TASK_QUEUE_ENABLE") == "2":
        yield Finding(("environment", "rollout", "TASK_QUEUE_ENABLE"), _NO_CAPTURE, queue)
    blocking = "ASCEND_LAUNCH_BLOCKING"
    for place in ("variables", "rollout"):
        if getattr(spec.environment, place).get(blocking) == "1":
            yield Finding(("environment", place, blocking), _NO_CAPTURE, "0, or leave it out")
    if spec.resources.overrides.environment.get(blocking) == "1":
        yield Finding(("resources", "overrides", "environment", blocking), _NO_CAPTURE, "0, or leave it out")
    given = {name: spec.rollout.engine_args.get(name) for name in ("additional_config", "compilation_config")}
    additional, compilation = (value if isinstance(value, dict) else {} for value in given.values())
    if additional.get("enable_sleep_mode_extra_cleanup"):
        yield Finding(
            ("rollout", "engineArgs", "additional_config", "enable_sleep_mode_extra_cleanup"),
            "each sleep destroys captured graphs (rollout.graphMode) and their HCCL groups, each waking captures anew",
            "leave it out",
        )
    if compilation.get("mode", 3) not in (3, "VLLM_COMPILE"):
        wrong = "vllm-ascend captures graphs (rollout.graphMode) of what vLLM compiles alone"
        yield Finding(("rollout", "engineArgs", "compilation_config", "mode"), wrong, "3, or leave it out")


DEVICE_CHECKS: dict[type, tuple[Check, ...]] = {RLJobSpec: (_additional, _visible, _graphs)}

DEVICES = (
    _unable_rule(
        "verifies_drafts",
        lambda s: s.rollout.speculative is not None,
        "!has(self.rollout.speculative)",
        field="rollout.speculative",
        wrong="vllm-ascend verifies guesses in a way of its own, with other tokens than without them",
        off="leave it out",
    ),
    _unable_rule(
        "returns_experts",
        lambda s: s.rollout.router_replay,
        "!self.rollout.routerReplay",
        field="rollout.routerReplay",
        wrong="vllm-ascend 0.23 may return where an expert is instead of which one it is (vllm-ascend 13882)",
        off="false",
    ),
    *(_engine_arg_rule(name) for name in sorted({arg for p in PROFILES.values() for arg in p.refused_engine_args})),
    _nz_rule("variables"),
    _nz_rule("rollout"),
    _runner_rule("variables"),
    _runner_rule("rollout"),
)
