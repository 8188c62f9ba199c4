"""What keeps a reward from the rest of the machine."""

from __future__ import annotations

from rljob_worker.doctor.facts import NodeFacts
from rljob_worker.doctor.findings import Finding, ok, warning

_FIX = "run jobs whose rewards execute what a model wrote on a newer kernel, as a user of their own; docs/security.md"


def check(facts: NodeFacts) -> list[Finding]:
    """Whether the kernel has what rewards are confined with."""
    name, wanted = "confined rewards", "Landlock ABI 6 (Linux 6.12) and seccomp filters"
    kernel = facts.kernel
    found = f"Landlock ABI {kernel.landlock}" if kernel.landlock else "no Landlock"
    found += ", seccomp filters" if kernel.filters else ", no seccomp filters"
    if remains := kernel.remains():
        return [warning(name, f"{found}: from a reward, {'; '.join(remains)}", wanted, _FIX)]
    return [ok(name, found, wanted)]
