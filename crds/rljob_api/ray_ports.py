"""Ports of Ray's worker processes in a pod.

In the node's network the pods of a server share its ports: nodes with engines, where they are not the trainers', take
the next range.
"""

from __future__ import annotations

WORKER_PORTS = (10002, 19999)
"""First and last by Ray's default (`--min-worker-port`, `--max-worker-port`)."""
PORTS_OF_A_GROUP = 10000


def worker_ports(place: int) -> tuple[int, int]:
    """First and last port of a group of nodes, by its place among those that may share a server, from 0."""
    first, last = WORKER_PORTS
    return first + place * PORTS_OF_A_GROUP, last + place * PORTS_OF_A_GROUP
