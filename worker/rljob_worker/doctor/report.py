"""The whole examination: collect, judge, and put the findings together."""

from __future__ import annotations

from rljob_api.wanted import Wanted
from rljob_api.wire.names import DASHBOARD_PORT, GCS_PORT
from rljob_worker.doctor.collect import collect
from rljob_worker.doctor.examine import examine
from rljob_worker.doctor.findings import Report, not_applicable, on_node


def of_node(wanted: Wanted | None, head: str | None, *, deep: bool) -> Report:
    """This node alone.

    Args:
        wanted: what a job wants; None: what any job of this machine's kind wants.
        head: whose Ray ports are tried.
        deep: use the devices too.
    """
    ports = (GCS_PORT, DASHBOARD_PORT)
    facts = collect(wanted, [f"{head}:{port}" for port in ports] if head else ())
    found = examine(facts, wanted)
    if deep:
        from rljob_worker.doctor.deep import deep_findings

        found += deep_findings(facts, wanted)
    found.append(not_applicable("other nodes", "not looked at; --ray looks at all nodes of a Ray cluster"))
    profile = wanted.profile.value if wanted is not None else None
    return Report(facts.kind, profile, (facts.host,), False, tuple(on_node(facts.host, found)))


def of_cluster(wanted: Wanted | None, address: str) -> Report:
    """Every node of a Ray cluster.

    Raises:
        JobError: no cluster answers, or one of its nodes does not.
        UserError: the address is none.
    """
    from rljob_worker.cluster.ray_session import connected
    from rljob_worker.doctor.nodes import look_everywhere

    with connected(address):
        nodes, together = look_everywhere(wanted)
    found = [finding for facts in nodes for finding in on_node(facts.host, examine(facts, wanted))]
    profile = wanted.profile.value if wanted is not None else None
    return Report(nodes[0].kind, profile, tuple(facts.host for facts in nodes), True, (*found, *together))
