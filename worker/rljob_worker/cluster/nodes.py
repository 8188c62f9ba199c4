"""Work that the driver gives to the nodes where trainers and engines run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import ray
import ray.exceptions
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rljob_worker.cluster.node_helper import NodeHelper
from rljob_worker.cluster.placement import Node, Placement, Spot
from rljob_worker.errors import JobError
from rljob_worker.upstream.ray_types import method_of, remote_actor

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)
_NO_ANSWER = ray.exceptions.RayError


class _Helper(Protocol):
    def submit(
        self, method: Callable[Concatenate[NodeHelper, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[float], T]:
        """Start a method; the result of the function that is returned, within so many seconds, is its result."""
        ...

    def end(self) -> None:
        """Let the helper go."""
        ...


class _Here:
    def __init__(self, root: Path) -> None:
        self._helper = NodeHelper(str(root))

    def submit(
        self, method: Callable[Concatenate[NodeHelper, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[float], T]:
        result = method(self._helper, *args, **kwargs)
        return lambda seconds: result

    def end(self) -> None:
        """Nothing to let go."""


class _There:
    def __init__(self, spot: Spot, environment: Mapping[str, str]) -> None:
        self._handle = (
            remote_actor(NodeHelper, num_cpus=0, max_restarts=0, max_concurrency=4)
            .options(
                runtime_env={"env_vars": dict(environment)},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    spot.group, placement_group_bundle_index=spot.bundle
                ),
            )
            .remote()
        )

    def submit(
        self, method: Callable[Concatenate[NodeHelper, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[float], T]:
        ref = method_of(self._handle, method).remote(*args, **kwargs)
        return lambda seconds: ray.get(ref, timeout=max(0.0, seconds))

    def end(self) -> None:
        ray.kill(self._handle)


class Nodes:
    """The job's nodes, each with a helper.

    Args:
        placement: where they are.
        scratch: folder for the helper's when the only node is the driver's own; None on a cluster of others.
        environment: variables of the helpers on other nodes.
    """

    def __init__(self, placement: Placement, scratch: Path | None, environment: Mapping[str, str]) -> None:
        self._nodes = list(placement.nodes)
        self._environment = environment
        self._lock = threading.Lock()
        self._helpers: list[_Helper] = [
            _There(placement.spot(placement.first_device(i)), environment) if scratch is None else _Here(scratch)
            for i in range(len(self._nodes))
        ]

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, node: int) -> Node:
        return self._nodes[node]

    def add(self, node: Node, spot: Spot) -> int:
        """A node that came later; its position. Thread-safe."""
        with self._lock:
            self._helpers.append(_There(spot, self._environment))
            self._nodes.append(node)
            return len(self._nodes) - 1

    def folder(self, node: int, seconds: float) -> str:
        """One node's folder; JobError as below."""
        return self._answer(node, self._helpers[node].submit(NodeHelper.folder), "folder", seconds)

    def folders(self, seconds: float) -> list[str]:
        """Each node's folder; JobError when one of them does not answer in time."""
        return self._gather([helper.submit(NodeHelper.folder) for helper in self._helpers], "folder", seconds)

    def free_port(self, node: int, seconds: float) -> int:
        """A port of a node's address that nobody listens on; JobError when the node does not answer in time."""
        asked = self._helpers[node].submit(NodeHelper.free_port, self._nodes[node].address)
        return self._answer(node, asked, "free_port", seconds)

    def missing(self, paths: Sequence[str], patience: float, seconds: float) -> list[list[str]]:
        """For each node, those of the paths that do not show up there within `patience`; JobError as above."""
        asked = [helper.submit(NodeHelper.missing, paths, patience) for helper in self._helpers]
        return self._gather(asked, "missing", seconds)

    def _gather(self, pending: Sequence[Callable[[float], T]], what: str, seconds: float) -> list[T]:
        deadline = time.monotonic() + seconds
        return [self._answer(node, result, what, deadline - time.monotonic()) for node, result in enumerate(pending)]

    def _answer(self, node: int, result: Callable[[float], T], what: str, seconds: float) -> T:
        try:
            return result(seconds)
        except _NO_ANSWER as error:
            raise JobError(f"node {self._nodes[node]} does not answer ({what}): {error}") from error

    def answers(self, node: int, seconds: float) -> bool:
        """Whether a node answers at all."""
        try:
            self._answer(node, self._helpers[node].submit(NodeHelper.folder), "folder", seconds)
        except JobError:
            return False
        return True

    def signal(self, pids: Mapping[int, Sequence[int]], number: int, seconds: float) -> dict[Node, list[int]]:
        """Send a signal to the processes of each node that still answers; returns processes that are gone."""
        asked = {node: self._helpers[node].submit(NodeHelper.signal, here, number) for node, here in pids.items()}
        return self._answers_in_time(asked, seconds)

    def end(self, pids: Mapping[int, Sequence[int]], patience: float, seconds: float) -> None:
        """Kill what does not leave within `patience`, on each node that still answers."""
        asked = {node: self._helpers[node].submit(NodeHelper.end, here, patience) for node, here in pids.items()}
        self._answers_in_time(asked, patience + seconds)

    def _answers_in_time(self, pending: Mapping[int, Callable[[float], T]], seconds: float) -> dict[Node, T]:
        deadline = time.monotonic() + seconds
        answers: dict[Node, T] = {}
        for node, result in pending.items():
            try:
                answers[self._nodes[node]] = result(deadline - time.monotonic())
            except _NO_ANSWER:
                logger.warning("node %s does not answer", self._nodes[node])
        return answers

    def close(self, seconds: float) -> None:
        """Remove the nodes' folders and let the helpers go."""
        pending = [helper.submit(NodeHelper.close) for helper in self._helpers]
        deadline = time.monotonic() + seconds
        for result in pending:
            with suppress(_NO_ANSWER):
                result(deadline - time.monotonic())
        for helper in self._helpers:
            helper.end()
