"""Undocumented variables and constants of Ray, for a Ray that a driver starts."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rljob_api.wire.exit_codes import ExitCode
from rljob_worker.upstream.patch import RAY, Patch, Process, put

if TYPE_CHECKING:
    from subprocess import Popen

    from ray._private.node import Node
    from ray._private.services import ProcessInfo

T = TypeVar("T")
FULL_PRIORITY = {"RAY_worker_niceness": "0"}
"""For the actors of a job on somebody else's Ray, in their `runtime_env`."""
_END_CHILDREN = {
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",
    # Beside it, Ray would end those of an actor's process group alone: a child with a session of its own stayed.
    "RAY_process_group_cleanup_enabled": "false",
}
_HELPERS = ("start_monitor", "start_log_monitor", "start_api_server")
_CHANGED = (*_HELPERS, "start_raylet")
_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_NO_PORT = -1
_AGENT_COMMAND = "--dashboard_agent_command="
_NO_AGENT = f"{_AGENT_COMMAND}cat"
"""Its standard input is a pipe of the raylet's."""
_START_SECONDS = 120.0
_NO_SPARE_WORKER = {"RAY_prestart_worker_first_driver": "0"}
_SLOW_START = {
    "RAY_raylet_start_wait_time_s": f"{_START_SECONDS:g}",
    "RAY_agent_register_timeout_ms": f"{1000 * _START_SECONDS:.0f}",
}
_POLL_SECONDS = 0.05
_LEAVE_SECONDS = 5.0
"""Seconds for summary and report of a driver whose GCS is gone."""


def settings() -> dict[str, str]:
    """Variables for Ray and its processes."""
    return FULL_PRIORITY | _END_CHILDREN | _NO_SPARE_WORKER | _SLOW_START


@contextmanager
def clusters_off() -> Iterator[None]:
    """Inside, Ray takes the loopback address for its own: of a node that could have others it takes another."""
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


Started = list[tuple[str, "Popen[bytes]"]]
"""Names and processes."""


@contextmanager
def without_helpers(started: Started | None = None) -> Iterator[None]:
    """Inside, a Ray that is started has no autoscaler, no log monitor and no dashboard, nor the dashboard's agent.

    Its raylet refuses to have none, and ends with it: it is given a process that waits for the raylet's end. It also
    waits 15 seconds for the ports that its agent writes into files, a number in its code, and dies: it reads beforehand
    what an agent would write that serves nobody, that there are none.

    Args:
        started: gets each process of Ray's that is started.
    """
    from ray._private import services
    from ray._private.node import Node

    before = {name: getattr(Node, name) for name in _CHANGED}
    start_process = services.start_ray_process
    start_raylet = told_agent_ports(before["start_raylet"], lambda node, name: _NO_PORT)
    put(Node, **dict.fromkeys(_HELPERS, _start_nothing), start_raylet=start_raylet)
    put(services, start_ray_process=noted(without_agent(start_process), [] if started is None else started))
    try:
        yield
    finally:
        put(Node, **before)
        put(services, start_ray_process=start_process)


def without_agent(start_process: Callable[..., T]) -> Callable[..., T]:
    """`start_ray_process` of Ray, for raylets whose dashboard agent is a process that does nothing."""

    def start(command: list[str], *arguments: object, **named: object) -> T:
        own = [_NO_AGENT if part.startswith(_AGENT_COMMAND) else part for part in command]
        return start_process(own, *arguments, **named)

    return start


def noted(start_process: Callable[..., ProcessInfo], started: Started) -> Callable[..., ProcessInfo]:
    """`start_ray_process` of Ray that says which processes it started."""

    def start(command: list[str], process_type: str, *arguments: object, **named: object) -> ProcessInfo:
        info = start_process(command, process_type, *arguments, **named)
        started.append((process_type, info.process))
        return info

    return start


def told_agent_ports(start_raylet: Callable[..., None], port: Callable[[Node, str], int]) -> Callable[..., None]:
    """`start_raylet` of Ray's `Node`, after files that say the ports of its agent: the raylet reads them there.

    Args:
        start_raylet: Ray's.
        port: the node's port of one of the names that Ray's `Node` gives them.
    """

    def start(node: Node, *arguments: object, **named: object) -> None:
        from ray._raylet import persist_port  # type: ignore[attr-defined]

        for name in _AGENT_PORTS:
            persist_port(node.get_session_dir_path(), node.node_id, name, port(node, name))
        start_raylet(node, *arguments, **named)

    return start


def _start_nothing(node: object, **arguments: object) -> None:
    """In the place of a method of Ray's `Node`."""


@contextmanager
def session_of_its_own() -> Iterator[None]:
    """Inside, Ray's processes are started in sessions of their own, as they end with the driver anyway.

    A signal to a job's process group (`timeout`, `kill -- -GROUP`) is meant for the driver, which then saves: Ray
    blocks SIGINT in its processes, and would end with any other.
    """
    from ray._private import services

    original = services.ConsolePopen
    put(services, ConsolePopen=partial(original, start_new_session=True))
    try:
        yield
    finally:
        put(services, ConsolePopen=original)


@contextmanager
def slow_start(started: Started | None = None) -> Iterator[None]:
    """Inside, a node that starts has 120 seconds until Ray's GCS has it, and is seen as soon as that does.

    Ray's own 30 seconds are no setting; and a request that comes too early is answered two seconds later.

    Args:
        started: Ray's processes; a node of which one ended is not waited for.
    """
    from ray._private import services

    original = services.get_node

    def get_node(gcs_address: str, node_id: str) -> object:
        deadline = time.monotonic() + _START_SECONDS
        _wait_until_known(gcs_address, node_id, deadline, started or [])
        while True:
            try:
                return original(gcs_address, node_id)
            except RuntimeError:
                if time.monotonic() > deadline or any_ended(started or []):
                    raise
                time.sleep(_POLL_SECONDS)

    put(services, get_node=get_node)
    try:
        yield
    finally:
        put(services, get_node=original)


def addresses() -> tuple[str, str]:
    """HOST:PORT of the GCS that this process is connected to, and the socket of its node's raylet."""
    from ray._private import worker

    node = worker._global_node
    assert node is not None
    return str(node.gcs_address), str(node.raylet_socket_name)


def forget() -> None:
    """Have this process, which fails for that, end without a Ray whose GCS is gone: it would wait, or crash."""
    from ray._private import worker

    # Ray's own tells its GCS of the exception.
    sys.excepthook = sys.__excepthook__
    atexit.unregister(worker.shutdown)
    atexit.register(_leave)
    late = threading.Timer(_LEAVE_SECONDS, _leave)
    late.daemon = True
    late.start()


def _leave() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(ExitCode.FAILED)


def any_ended(started: Started) -> bool:
    """Whether one of the processes is there no more."""
    return any(process.poll() is not None for _, process in started)


def _wait_until_known(gcs_address: str, node_id: str, deadline: float, started: Started) -> None:
    from ray._private import services
    from ray._private.state import GlobalState

    state = GlobalState()
    state._initialize_global_state(services._get_gcs_client_options(gcs_address))
    while all(node["NodeID"] != node_id for node in state.node_table()) and time.monotonic() < deadline:
        if any_ended(started):
            return
        time.sleep(_POLL_SECONDS)


PATCHES = (
    Patch(
        "ray-settings",
        tuple(f"env:{name}" for name in settings()),
        {"ray": RAY},
        "Ray makes its workers nice: beside anything else they would get a fraction of the machine; and SIGKILL of "
        "an actor would leave the engine's own child processes behind; and a start that takes over 30 seconds, as on a "
        "busy machine, would count as failed; and a worker would be started for tasks, of which a job has none",
        "tests/worker/upstream/test_patches.py::test_ray_reads_its_settings",
        settings,
        (Process.DRIVER,),
        scoped=True,
    ),
    Patch(
        "ray-on-loopback",
        ("ray._private.ray_constants.ENABLE_RAY_CLUSTER",),
        {"ray": RAY},
        "an embedded Ray would listen on an address of the machine, even if it is told another",
        "tests/worker/driver/test_closed_ports.py::test_a_stranger_reaches_nothing",
        clusters_off,
        (Process.DRIVER,),
        scoped=True,
    ),
    Patch(
        "ray-without-helpers",
        (*(f"ray._private.node.Node.{name}" for name in _CHANGED), "ray._private.services.start_ray_process"),
        {"ray": RAY},
        "an embedded Ray's nodes are as many as they are, nobody asks for its dashboard, and logs are read from files: "
        "four processes less make a job start in half the time, and leave fewer ports open; and a raylet dies if its "
        "agent takes 15 seconds to start",
        "tests/worker/cluster/test_ray_session.py::test_an_embedded_ray_has_no_process_that_nobody_asks",
        without_helpers,
        (Process.DRIVER,),
        scoped=True,
    ),
    Patch(
        "ray-in-sessions-of-its-own",
        ("ray._private.services.ConsolePopen",),
        {"ray": RAY},
        "a SIGTERM for the driver's process group ended Ray before the driver could save, and then the driver",
        "tests/worker/driver/test_job.py::test_sigterm_saves_the_last_completed_step_and_resume_continues",
        session_of_its_own,
        (Process.DRIVER,),
        scoped=True,
    ),
    Patch(
        "ray-slow-start",
        ("ray._private.services.get_node",),
        {"ray": RAY},
        "Ray gives its node 30 seconds to start, written into its code; on a busy machine that is too short. And it "
        "looks for it once a second, so that each start took up to two seconds longer than it had to",
        "tests/worker/upstream/test_ray_node.py::test_a_node_that_takes_its_time_is_waited_for",
        slow_start,
        (Process.DRIVER,),
        scoped=True,
    ),
)
