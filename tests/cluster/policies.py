"""Holds the node's pods to their NetworkPolicies: rules of nftables, as the API server has them now.

The bridge that the pods hang on has no policies, and the reference implementation of Kubernetes' own wants a kernel
that hands packets to a process. What goes between pods is held; what the node itself takes or sends is not, as with
other implementations, and what a rule may say and nobody here says is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from control_plane import ControlPlane
from kube import Object

_TABLE = "inet rljob_policies"
_PAUSE = 0.3
_BASE = "type filter hook forward priority {}; policy accept; ct state established,related accept"


class _Side(NamedTuple):
    direction: str
    own: str
    """Field of a packet with the address of the pod that is held."""
    other: str
    peers: str
    priority: int


_SIDES = (_Side("Egress", "saddr", "daddr", "to", 10), _Side("Ingress", "daddr", "saddr", "from", 20))


@contextmanager
def policies_enforced(cluster: ControlPlane) -> Iterator[None]:
    """Within the context, and from the first moment, pods are reached as their policies admit; changed policies
    count."""
    rules = _current(cluster)
    _apply(cluster, rules)
    ended = threading.Event()
    failed: list[Exception] = []

    def follow() -> None:
        known = rules
        while not ended.wait(_PAUSE):
            try:
                if (new := _current(cluster)) != known:
                    _apply(cluster, known := new)
            except Exception as error:
                failed.append(error)
                return

    thread = threading.Thread(target=follow, name="policies")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        cluster.execute("nft", "delete", "table", *_TABLE.split())
    if failed:
        raise failed[0]


def nft_rules(policies: Sequence[Object], pods: Sequence[Object], namespaces: Mapping[str, Mapping[str, str]]) -> str:
    """The table for nft, without what was there.

    Args:
        policies: NetworkPolicies of all namespaces.
        pods: those of all namespaces that have an address of their own.
        namespaces: labels by name.

    Raises:
        ValueError: a policy says what is not known here.
    """
    chains = []
    for side in _SIDES:
        lines = [line for pod in pods for line in _lines(side, pod, policies, pods, namespaces)]
        chains.append(_chain(side.direction.lower(), [_BASE.format(f"filter + {side.priority}"), *lines]))
    return f"table {_TABLE} {{\n{''.join(chains)}}}\n"


def _lines(
    side: _Side,
    pod: Object,
    policies: Sequence[Object],
    pods: Sequence[Object],
    namespaces: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """Rules of one pod; none: no policy selects it."""
    specs = [
        policy["spec"]
        for policy in policies
        if side.direction in policy["spec"]["policyTypes"]
        and policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
        and _selects(policy["spec"].get("podSelector", {}), pod["metadata"].get("labels", {}))
    ]
    if not specs:
        return []
    own = f"ip {side.own} {pod['status']['podIP']}"
    targets = [pod] if side.direction == "Ingress" else pods
    admitted = [
        f"{own} {peers}{ports}accept"
        for spec in specs
        for rule in spec.get(side.direction.lower(), [])
        for peers in _peers(side, rule.get(side.peers), pod, pods, namespaces)
        for ports in _ports(rule.get("ports"), targets)
    ]
    return [*admitted, f"{own} counter drop"]


def _chain(name: str, lines: Sequence[str]) -> str:
    return f" chain {name} {{\n" + "".join(f"  {line}\n" for line in lines) + " }\n"


def _peers(
    side: _Side,
    listed: list[Object] | None,
    pod: Object,
    pods: Sequence[Object],
    namespaces: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """Conditions, one of which is to hold; none: nobody is admitted."""
    if not listed:
        return [""]
    found = set()
    for peer in listed:
        if "ipBlock" in peer:
            raise ValueError(f"NetworkPolicy: ipBlock is not known here: {peer}")
        for other in pods:
            about = other["metadata"]
            where = (
                _selects(peer["namespaceSelector"], namespaces[about["namespace"]])
                if "namespaceSelector" in peer
                else about["namespace"] == pod["metadata"]["namespace"]
            )
            if where and _selects(peer.get("podSelector", {}), about.get("labels", {})):
                found.add(other["status"]["podIP"])
    return [f"ip {side.other} {{ {', '.join(sorted(found))} }} "] if found else []


def _ports(listed: list[Object] | None, targets: Sequence[Object]) -> list[str]:
    """Conditions, one of which is to hold."""
    if not listed:
        return [""]
    found = []
    for port in listed:
        protocol = port.get("protocol", "TCP").lower()
        number = port.get("port")
        if number is None:
            found.append(f"meta l4proto {protocol} ")
        elif isinstance(number, int):
            found.append(f"{protocol} dport {number}-{port.get('endPort', number)} ")
        else:
            found += [f"{protocol} dport {given} " for given in sorted(_named(number, targets))]
    return found


def _named(name: str, pods: Sequence[Object]) -> set[int]:
    ports = (port for pod in pods for part in pod["spec"]["containers"] for port in part.get("ports", []))
    return {port["containerPort"] for port in ports if port.get("name") == name}


def _selects(selector: Object, labels: Mapping[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items()) and all(
        _holds(expression, labels) for expression in selector.get("matchExpressions", [])
    )


def _holds(expression: Object, labels: Mapping[str, str]) -> bool:
    operator, value = expression["operator"], labels.get(expression["key"])
    meanings: dict[str, Any] = {
        "Exists": value is not None,
        "DoesNotExist": value is None,
        "In": value in expression.get("values", []),
        "NotIn": value not in expression.get("values", []),
    }
    holds: bool = meanings[operator]
    return holds


def _current(cluster: ControlPlane) -> str:
    pods = [
        pod
        for pod in cluster.kube.list("Pod")
        if pod["status"].get("podIP")
        and pod["status"]["phase"] in ("Pending", "Running")
        and not pod["spec"].get("hostNetwork")
    ]
    labels = {each["metadata"]["name"]: each["metadata"].get("labels", {}) for each in cluster.kube.list("Namespace")}
    return nft_rules(cluster.kube.list("NetworkPolicy"), sorted(pods, key=lambda pod: pod["status"]["podIP"]), labels)


def _apply(cluster: ControlPlane, rules: str) -> None:
    """In one step: nobody gets through in between."""
    cluster.execute("nft", f"table {_TABLE}\ndelete table {_TABLE}\n{rules}")
