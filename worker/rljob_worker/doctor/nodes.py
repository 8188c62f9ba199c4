"""All nodes of a Ray cluster: each is looked at where it is, and then they are held against each other."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rljob_api.wanted import Wanted
from rljob_api.wire.names import DASHBOARD_PORT
from rljob_worker.cluster.placement import Node, living_nodes
from rljob_worker.doctor import parsers
from rljob_worker.doctor.collect import collect
from rljob_worker.doctor.facts import NodeFacts
from rljob_worker.doctor.findings import Finding, not_applicable, ok, problem, warning
from rljob_worker.doctor.network import chosen_interface
from rljob_worker.doctor.programs import ask
from rljob_worker.errors import JobError
from rljob_worker.upstream.ray_types import remote_task

T = TypeVar("T")

_SECONDS = 300.0
"""Deadline of one look at a node, npu-smi and hccn_tool on 16 devices included."""
_OWN_DEVICES = {
    # Ray would show a task that asks for no devices none of them.
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}
_COMPARED = ("cann", "torch", "torch_npu", "vllm", "vllm-ascend", "driver", "firmware", "rljob")


@dataclass(frozen=True, slots=True)
class Ping:
    """One NPU's network port asked for another's."""

    index: int
    address: str
    problem: str = ""


def look_everywhere(wanted: Wanted | None) -> tuple[list[NodeFacts], list[Finding]]:
    """Facts of every node that can hold devices, and what only all of them together can say.

    Raises:
        JobError: a node does not answer.
    """
    every = living_nodes(ray.nodes())
    nodes = [node for node in every if node.cpus > 0] or every
    gcs = ray.get_runtime_context().gcs_address
    head = (gcs, f"{gcs.rpartition(':')[0]}:{DASHBOARD_PORT}")
    facts: list[NodeFacts] = _on_each(nodes, collect, [(wanted, head)] * len(nodes))
    found = compare(facts, wanted)
    found += _pinged(facts, _on_each(nodes, ping, [(targets,) for targets in ping_targets(facts)]))
    return facts, found + _same_storage(nodes, facts)


def compare(facts: Sequence[NodeFacts], wanted: Wanted | None) -> list[Finding]:
    """Compare values that must be equal on all nodes. Pure."""
    found = []
    if wanted is not None:
        right = f"{wanted.nodes} (spec.resources.nodes)"
        if len(facts) < wanted.nodes:
            found.append(problem("nodes", str(len(facts)), right, "wait for the others, or see why they do not join"))
        else:
            found.append(ok("nodes", str(len(facts)), right))
    for name in _COMPARED:
        versions = {f.host: f.versions.get(name, "none") for f in facts}
        if len(set(versions.values())) > 1:
            fix = "HCCL and Ray need the same on all nodes: one image, one driver release"
            found.append(problem(f"{name} on all nodes", _by_node(versions), "the same", fix))
    found.append(_same_image(facts))
    if any(f.kind == "npu" for f in facts):
        found += [_same_tls(facts), _same_interface(facts)]
    return found


def _same_image(facts: Sequence[NodeFacts]) -> Finding:
    name, digests = "image", {f.host: f.packages for f in facts}
    if len(set(digests.values())) == 1:
        return ok(name, f"the same packages everywhere ({facts[0].packages})", "the same")
    fix = "the nodes do not run the same image: pin it by digest (spec.image), or use imagePullPolicy Always"
    return problem(name, _by_node(digests), "the same packages and versions", fix)


def _same_tls(facts: Sequence[NodeFacts]) -> Finding:
    name = "NPU TLS on all nodes"
    states = {f.host: sorted({"on" if p.tls else "off" for p in f.ports if p.tls is not None}) for f in facts}
    said = {host: " and ".join(state) for host, state in states.items() if state}
    if not said:
        return not_applicable(name, "hccn_tool says nothing about it")
    if len(set(said.values())) == 1:
        return ok(name, next(iter(said.values())), "the same")
    fix = "`hccn_tool -i N -tls -s enable 0` for every N on the nodes where it is on"
    return problem(name, _by_node(said), "the same", fix)


def _same_interface(facts: Sequence[NodeFacts]) -> Finding:
    name = "HCCL interface on all nodes"
    chosen = {f.host: chosen_interface(f.trainer.variables.get("HCCL_SOCKET_IFNAME"), f.interfaces) for f in facts}
    names = {host: interface.name if interface else "none" for host, interface in chosen.items()}
    if len(set(names.values())) == 1:
        return ok(name, next(iter(names.values())), "one network")
    fix = "they must lie in one network: name them in spec.hccl.interface, like =enp1s0,enp2s0"
    return warning(name, _by_node(names), "one network", fix)


def _by_node(values: Mapping[str, str]) -> str:
    """Each value with the nodes that have it, the rarest first: that is where the fault is."""
    by_value: dict[str, list[str]] = {}
    for host, value in values.items():
        by_value.setdefault(value, []).append(host)
    ranked = sorted(by_value.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{value} on {', '.join(hosts[:3])}{' ...' * (len(hosts) > 3)}" for value, hosts in ranked)


def ping_targets(facts: Sequence[NodeFacts]) -> list[list[tuple[int, str]]]:
    """For each node, (own device, address of the next node's device with the same number)."""
    targets: list[list[tuple[int, str]]] = []
    for i, own in enumerate(facts):
        other = {p.index: p.address for p in facts[(i + 1) % len(facts)].ports} if len(facts) > 1 else {}
        pairs = [(p.index, other.get(p.index)) for p in own.ports]
        targets.append([(index, address) for index, address in pairs if address])
    return targets


def ping(targets: Sequence[tuple[int, str]]) -> list[Ping]:
    """Ask for each address from the device's own port; runs on the node that has the devices."""
    with ThreadPoolExecutor(max(len(targets), 1)) as pool:
        return list(pool.map(lambda target: _ping(*target), targets))


def _ping(index: int, address: str) -> Ping:
    answer = ask("hccn_tool", "-i", str(index), "-ping", "-g", "address", address)
    counted = parsers.hccn_ping(answer.text)
    if counted is None:
        return Ping(index, address, answer.problem or "hccn_tool gave no count of packets")
    sent, received = counted
    return Ping(index, address, "" if received == sent else f"{received} of {sent} packets came back")


def _pinged(facts: Sequence[NodeFacts], pings: Sequence[Sequence[Ping]]) -> list[Finding]:
    name, wanted = "NPU ping between nodes", "every packet comes back"
    if not any(pings):
        return [not_applicable(name, "one node, or no NPU has a network address")]
    lost = [(f.host, p) for f, of_node in zip(facts, pings) for p in of_node if p.problem]
    if not lost:
        return [ok(name, f"{sum(map(len, pings))} ways", wanted)]
    host, first = lost[0]
    found = f"{len(lost)} ways fail, first {host} device {first.index} to {first.address}: {first.problem}"
    fix = "the NPUs' network: addresses in one subnet (`hccn_tool -i N -ip -g`), VLAN, switch, cable"
    return [problem(name, found, wanted, fix)]


def _same_storage(nodes: Sequence[Node], facts: Sequence[NodeFacts]) -> list[Finding]:
    """A file that one node writes into the run folder must be there on the others."""
    name, wanted = "run folder on all nodes", "a file of one node is seen by all"
    places = [f.runs for f in facts]
    if len(nodes) < 2 or any(place is None for place in places):
        return [not_applicable(name, "one node, or no absolute path is named")]
    bases = {f.host: place.base for f, place in zip(facts, places) if place is not None}
    writer = next((i for i, place in enumerate(places) if place is not None and place.writable), None)
    fix = "mount the same storage there (spec.storage.volumes): a node alone would take checkpoints and lose them"
    if len(set(bases.values())) > 1:
        return [problem(name, _by_node(bases), wanted, fix)]
    if writer is None:
        return [not_applicable(name, "no node may write there, so it cannot be tried")]
    with _marker(nodes[writer], bases[facts[writer].host]) as marker:
        seen = _on_each(nodes, os.path.exists, [(marker,)] * len(nodes))
    blind = [f.host for f, sees in zip(facts, seen) if not sees]
    if blind:
        return [problem(name, f"not seen on {', '.join(blind)}", wanted, fix)]
    return [ok(name, "the same everywhere", wanted)]


@contextmanager
def _marker(node: Node, folder: str) -> Iterator[str]:
    name = str(Path(folder) / f".rljob-doctor-{uuid.uuid4().hex}")
    _on_each([node], touch, [(name,)])
    try:
        yield name
    finally:
        _on_each([node], remove, [(name,)])


def touch(name: str) -> None:
    """Make an empty file."""
    Path(name).touch()


def remove(name: str) -> None:
    """Remove it."""
    Path(name).unlink(missing_ok=True)


def _on_each(nodes: Sequence[Node], function: Callable[..., T], arguments: Sequence[tuple[object, ...]]) -> list[T]:
    task = remote_task(function, num_cpus=0, max_retries=0)
    references = [
        task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            runtime_env={"env_vars": _OWN_DEVICES},
        ).remote(*given)
        for node, given in zip(nodes, arguments)
    ]
    try:
        return list(ray.get(references, timeout=_SECONDS))
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError) as error:
        raise JobError(f"a node does not answer the doctor: {error}") from error
