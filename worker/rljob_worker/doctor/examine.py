"""From facts to findings: all checks of one node."""

from __future__ import annotations

from rljob_api.spec import MemorySaverMode
from rljob_api.wanted import Wanted
from rljob_worker.doctor import allocator, built_for, confinement, devices, memory, network, saver, versions
from rljob_worker.doctor.facts import NodeFacts
from rljob_worker.doctor.findings import Finding


def examine(facts: NodeFacts, wanted: Wanted | None) -> list[Finding]:
    """All findings about one node, in the order in which a job would meet what they are about. Pure.

    Args:
        facts: what was collected there.
        wanted: what the job wants; None: what any job of this kind wants.
    """
    default = MemorySaverMode.OFF if facts.kind == "cpu" else MemorySaverMode.PRELOAD
    mode = wanted.memory_saver if wanted is not None else default
    found = [*versions.check(facts, mode), *built_for.check(facts, wanted), *devices.check(facts, wanted)]
    found += saver.check(facts, mode) if wanted is not None else saver.check_installed(facts)
    found += allocator.check(facts, job=wanted is not None)
    found += network.check(facts, wanted.nodes if wanted is not None else 1)
    return [*found, *memory.check(facts, wanted), *confinement.check(facts)]
