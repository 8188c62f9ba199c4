"""Settings of torch's device allocator, in trainers and engines."""

from __future__ import annotations

import re

from rljob_worker.doctor.facts import NodeFacts, ProcessFacts
from rljob_worker.doctor.findings import Finding, not_applicable, ok, problem, warning
from rljob_worker.doctor.versions import line_of

_OWN = {"npu": "PYTORCH_NPU_ALLOC_CONF", "cuda": "PYTORCH_CUDA_ALLOC_CONF"}
_COMMON = "PYTORCH_ALLOC_CONF"
_OFF = re.compile(r"\bexpandable_segments\s*:\s*false\b", re.IGNORECASE)
_ON = re.compile(r"\bexpandable_segments\s*:\s*true\b", re.IGNORECASE)


def check(facts: NodeFacts, *, job: bool) -> list[Finding]:
    """Both roles' settings; `job`: whether a job says what they are, or only this shell's are known."""
    if facts.kind == "cpu":
        return [not_applicable("allocator", "the cpu device has no device allocator")]
    line = line_of(facts.versions.get("torch_npu", "")) if facts.kind == "npu" else None
    strict = line is not None and not line.both_allocator_variables
    roles = [("trainers", facts.trainer), ("engines", facts.rollout)] if job else [("this shell", facts.trainer)]
    return [_of(role, process, _OWN[facts.kind], strict, job) for role, process in roles]


def _of(role: str, process: ProcessFacts, own: str, strict: bool, job: bool) -> Finding:
    name, wanted = f"allocator of {role}", f"{own}=expandable_segments:False"
    given = {key: process.variables[key] for key in (own, _COMMON) if process.variables.get(key)}
    found = " ".join(f"{key}={value}" for key, value in given.items()) or "nothing set"
    if process.problem:
        return not_applicable(name, f"a process with that environment {process.problem}")
    if len(given) == 2:
        fix = f"unset {_COMMON}: it is for all kinds of devices, and {own} says the same"
        if strict:
            return problem(name, found, wanted, f"this torch_npu refuses to start with both; {fix}")
        return warning(name, found, wanted, f"newer torch_npu refuses to start with both; {fix}")
    if any(_ON.search(value) for value in given.values()):
        fix = "neither the memory saver nor vLLM's sleep works on expandable segments: set it to False in so many words"
        return problem(name, found, wanted, fix) if job else warning(name, found, wanted, f"{fix}; a job does that")
    if any(_OFF.search(value) for value in given.values()):
        return ok(name, found, wanted)
    fix = "vLLM on Ascend switches expandable segments on where nothing is said"
    return problem(name, found, wanted, fix) if job else ok(name, f"{found}; a job sets it", wanted)
