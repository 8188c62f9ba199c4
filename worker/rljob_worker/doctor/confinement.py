"""Bounds of rewards, and of programs that a policy wrote, on this kernel."""

from __future__ import annotations

from rljob_worker.doctor.facts import NodeFacts
from rljob_worker.doctor.findings import Finding, ok, warning
from rljob_worker.sandbox import kernel as sandbox

_FIX = "run jobs whose rewards execute what a model wrote on a newer kernel, as a user of their own; docs/security.md"
_FIX_PROGRAMS = (
    "run jobs with reward.name: code on a newer kernel; where it has filters and nothing of the driver's user is "
    "secret, spec.sandbox.requireFiles: false lets them start"
)


def check(facts: NodeFacts) -> list[Finding]:
    """Whether the kernel has what rewards are confined with, and programs that the reward `code` runs."""
    return [_rewards(facts), _programs(facts)]


def _rewards(facts: NodeFacts) -> Finding:
    name, wanted = "confined rewards", "Landlock ABI 6 (Linux 6.12) and seccomp filters"
    kernel = facts.kernel
    found = f"Landlock ABI {kernel.landlock}" if kernel.landlock else "no Landlock"
    found += ", seccomp filters" if kernel.filters else ", no seccomp filters"
    if remains := kernel.remains():
        return warning(name, f"{found}: from a reward, {'; '.join(remains)}", wanted, _FIX)
    return ok(name, found, wanted)


def _programs(facts: NodeFacts) -> Finding:
    name, wanted = "sandbox of programs", "Landlock (Linux 5.13) and seccomp filters"
    namespaces = f"no isolation Namespace: {facts.no_namespaces}" if facts.no_namespaces else "isolation Namespace too"
    if lacks := sandbox.lacks(facts.kernel):
        return warning(name, "; ".join([*lacks, namespaces]), wanted, _FIX_PROGRAMS)
    return ok(name, f"has both: spec.sandbox.isolation Process; {namespaces}", wanted)
