"""Interfaces and ports of this node: HCCL's, Ray's, and the NPUs' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rljob_api.wire.names import DASHBOARD_PORT
from rljob_worker.doctor.facts import Interface, NodeFacts
from rljob_worker.doctor.findings import Finding, not_applicable, ok, problem, warning

_BASE_PORT = 60000
_BASE_PORTS = 16
"""HCCL listens on so many from HCCL_IF_BASE_PORT on, 60000 by default (CANN's environment variable reference)."""
_LAST_PORT = 65535


class NoPortRange(ValueError):
    """The variable is none."""


def host_ports(variables: Mapping[str, str]) -> tuple[int, ...]:
    """The TCP ports that HCCL is set to listen on; none where the system picks them, or nobody can read the value."""
    try:
        return port_range(variables)
    except NoPortRange:
        return ()


def port_range(variables: Mapping[str, str]) -> tuple[int, ...]:
    """The same; a value such as `60000-60050,61000`, or `auto` for none.

    Raises:
        NoPortRange: the value is none.
    """
    value = variables.get("HCCL_HOST_SOCKET_PORT_RANGE")
    if value == "auto":
        return ()
    if value is None:
        base = variables.get("HCCL_IF_BASE_PORT", str(_BASE_PORT))
        value = f"{base}-{int(base) + _BASE_PORTS - 1}" if base.isdigit() else base
    ports: list[int] = []
    for part in value.split(","):
        first, _, last = part.partition("-")
        if (
            not first.isdigit()
            or not (last or first).isdigit()
            or not 0 < int(first) <= int(last or first) <= _LAST_PORT
        ):
            raise NoPortRange(f"{value!r}: ranges like 60000-60050 are read, or auto")
        ports += range(int(first), int(last or first) + 1)
    return tuple(ports)


def chosen_interface(value: str | None, interfaces: Sequence[Interface]) -> Interface | None:
    """The interface that HCCL takes for a value of HCCL_SOCKET_IFNAME.

    `eth` is a prefix, `=eth0` exact, `^` excludes; the first match wins. Without a value: the first in the order of
    names that is neither Docker's nor the loopback, then Docker's, then the loopback (CANN's HCCL guide).
    """
    working = sorted((i for i in interfaces if i.up), key=lambda i: i.name)
    if not value:
        ranked = sorted(working, key=lambda i: (i.name == "lo", i.name.startswith("docker")))
        return ranked[0] if ranked else None
    exclude, rest = value.startswith("^"), value.removeprefix("^")
    exact, names = rest.startswith("="), rest.removeprefix("=").split(",")

    def named(interface: Interface, name: str) -> bool:
        return interface.name == name if exact else interface.name.startswith(name)

    if exclude:
        return next((i for i in working if not any(named(i, name) for name in names)), None)
    return next((i for name in names for i in working if named(i, name)), None)


def check(facts: NodeFacts, nodes: int) -> list[Finding]:
    """Check this node's network for HCCL, Ray and the NPU ports; `nodes`: of the job."""
    head = _head(facts)
    if facts.kind != "npu":
        return [not_applicable("HCCL", "no NPU here: gloo or NCCL connect the processes"), head]
    return [_interface(facts, nodes), _ports(facts), *_npu_ports(facts, nodes), head]


def _interface(facts: NodeFacts, nodes: int) -> Finding:
    name, value = "HCCL interface", facts.trainer.variables.get("HCCL_SOCKET_IFNAME")
    found = chosen_interface(value, facts.interfaces)
    known = ", ".join(i.name for i in facts.interfaces) or "none"
    if found is None:
        fix = f"set spec.hccl.interface to one of those that are there: {known}"
        return problem(name, f"nothing matches {value!r}", "an interface that is up", fix)
    if value is None and not facts.trainer.variables.get("HCCL_IF_IP") and nodes > 1:
        fix = f"nodes may choose differently, and then do not find each other; set spec.hccl.interface ({known})"
        return warning(name, f"{found.name}, HCCL's own choice", "one that all nodes share, by name", fix)
    how = f"by {value}" if value else "HCCL's own choice"
    return ok(name, f"{found.name}, {how}", "an interface that is up")


def _ports(facts: NodeFacts) -> Finding:
    name = "HCCL ports"
    variables = facts.trainer.variables
    try:
        ports = port_range(variables)
    except NoPortRange as error:
        return problem(name, str(error), "free ports", "take spec.hccl.trainerPorts.host, or leave it out: auto")
    if not ports:
        return ok(name, "auto: the system picks free ones", "free ports")
    span = f"{ports[0]} to {ports[-1]}"
    if facts.busy_ports:
        taken = ", ".join(map(str, facts.busy_ports[:4]))
        fix = (
            "`ss -ltnp` on the node names the process; leave spec.hccl.trainerPorts out, and the system picks free ones"
        )
        return problem(name, f"taken: {taken}", f"{span} free", fix)
    return ok(name, f"{span} are free", "free ports")


def _npu_ports(facts: NodeFacts, nodes: int) -> list[Finding]:
    """Link, TLS and address of the NPUs' network ports; between servers HCCL goes through them (RoCE)."""
    name = "NPU network"
    if not facts.ports:
        return [not_applicable(name, "no device files of NPUs in this container")]
    if facts.ports_problem and all(port.link is None and port.tls is None for port in facts.ports):
        fix = "hccn_tool is in the driver's folder `tools`, and reads /etc/hccn.conf: mount both (profile's hostMounts)"
        text = facts.ports_problem
        # It may want root where the pod's user is none: a finding, which keeps no pod from starting.
        return [warning(name, text, "an answer of hccn_tool", fix) if nodes > 1 else not_applicable(name, text)]
    return [_links(facts, nodes), _tls(facts)]


def _links(facts: NodeFacts, nodes: int) -> Finding:
    name, wanted = "NPU links", "all UP"
    down = [str(port.index) for port in facts.ports if port.link != "UP"]
    if not down:
        return ok(name, f"{len(facts.ports)} UP", wanted)
    found = f"not UP: {', '.join(down)}"
    if nodes == 1:
        return warning(name, found, wanted, "one node alone does not use them; a second one would")
    # Some drivers say DOWN about ports that work: whether packets arrive is what decides, and needs both ends.
    return warning(name, found, wanted, "cable, switch or `hccn_tool -i N -link -g`; `rljob doctor --ray` pings them")


def _tls(facts: NodeFacts) -> Finding:
    name, wanted = "NPU TLS", "the same on all devices"
    states = {port.index: port.tls for port in facts.ports if port.tls is not None}
    if not states:
        return not_applicable(name, "hccn_tool does not say it")
    on = [str(index) for index, tls in states.items() if tls]
    if len(set(states.values())) == 1:
        return ok(name, "on" if on else "off", wanted)
    fix = "switch it off everywhere: `for i in ...; do hccn_tool -i $i -tls -s enable 0; done` on the node"
    return problem(name, f"on for {', '.join(on)} only", wanted, fix)


def _head(facts: NodeFacts) -> Finding:
    name = "Ray's ports"
    if not facts.unreachable:
        return not_applicable(name, "no head was named (--head, --ray)")
    closed = {where: why for where, why in facts.unreachable.items() if why}
    wanted = f"{', '.join(facts.unreachable)} reachable"
    if not closed:
        return ok(name, "reachable", wanted)
    found = "; ".join(f"{where}: {why}" for where, why in closed.items())
    fix = "start the head, open the ports between the nodes (firewall, NetworkPolicy), or name the right address"
    if not all(where.endswith(f":{DASHBOARD_PORT}") for where in closed):
        return problem(name, found, wanted, fix)
    return warning(name, found, wanted, "the dashboard alone does not answer: the operator submits jobs through it")
