"""The Ray that a job runs on: one of its own, or a cluster that is already there."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import grpc
import ray
from ray._private import ray_constants, services
from ray._private.grpc_utils import init_grpc_channel
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from rljob_api import RLJobSpec, derived
from rljob_api.wire.names import PRIVATE_VARIABLES
from rljob_worker.cluster.placement import bundle_cpus
from rljob_worker.cluster.ray_watch import ClusterLook, RayWatch, dead_process
from rljob_worker.devices.kinds import device_kind
from rljob_worker.errors import JobError, UserError
from rljob_worker.host.files import log_tail
from rljob_worker.host.reaper import Reaper
from rljob_worker.host.secrets import withheld
from rljob_worker.host.sweeps import own_folder
from rljob_worker.upstream import ray_node
from rljob_worker.upstream.install import check
from rljob_worker.upstream.patch import Process
from rljob_worker.waiting import waiting_for

_RAY_FOLDER = "rljob-ray-"
_RAY_OWN = "r"
"""Ray lets all users write its folder, so that it lies in one that only its owner enters. Short, for Ray's sockets."""

_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_RAY_LOGS = ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err")
_LOG_TAIL_LINES = 10
_ANSWER_SECONDS = 25.0


@dataclass(frozen=True)
class RaySession:
    """A Ray that can be used."""

    scratch: Path | None = None
    """Folder for scratch files that goes with a Ray of this job alone."""
    settled: Callable[[], None] = lambda: None
    """To be called once the job's processes have all started."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Variables of this process that Ray's were not started with; for trainers and engines."""


@contextmanager
def embedded(spec: RLJobSpec, watch: RayWatch | None = None) -> Iterator[RaySession]:
    """A Ray on this machine for this job alone: it listens on the loopback address, and asks all for a token.

    Args:
        spec: the job.
        watch: is to look at its processes.

    Raises:
        JobError: Ray does not start, with what its processes say; it would listen on another address.
    """
    check(Process.DRIVER, device_kind(spec.resources).name)
    # Ray's agents outlive a killed driver for minutes.
    reaper = Reaper()
    folder = own_folder(_RAY_FOLDER)
    started: ray_node.Started = []
    if watch is not None:
        watch.begin(lambda: _dead_with_last_words(started, folder / _RAY_OWN))
    try:
        with (
            _settings(_own_settings(_new_token(folder))),
            _on_loopback(),
            ray_node.without_helpers(started),
            ray_node.slow_start(started),
            ray_node.session_of_its_own(),
        ):
            try:
                # Its processes keep what they were started with for all to see who may look at them.
                with waiting_for("Ray's processes on this machine to start"), withheld(_TOKEN_PATH) as secret:
                    _start(spec, folder / _RAY_OWN)
                _children_are_waited_for()
                address = ray.nodes()[0]["NodeManagerAddress"]
                if not ip_address(address).is_loopback:
                    raise JobError(f"the embedded Ray listens on {address}; it must be this machine's loopback address")
                handed = {name: value for name, value in secret.items() if name not in PRIVATE_VARIABLES}
                yield RaySession(folder, reaper.settled, handed)
            finally:
                if watch is not None:
                    watch.close()
                _end(started)
    finally:
        reaper.close()
        shutil.rmtree(folder, ignore_errors=True)


def _start(spec: RLJobSpec, folder: Path) -> None:
    try:
        ray.init(
            address="local",
            num_cpus=derived.devices(spec) * bundle_cpus(spec),
            log_to_driver=False,
            logging_level=logging.WARNING,
            _temp_dir=str(folder),
        )
    except Exception as error:
        # Ray raises no class of its own, and its logs go with its folder.
        raise JobError(f"start: Ray does not start on this machine: {error}\n{_last_words(folder)}") from error


def _end(started: ray_node.Started) -> None:
    """End Ray; without asking it where its GCS is gone, for which it would wait a minute and then abort."""
    if dead_process([one for one in started if one[0] == ray_constants.PROCESS_TYPE_GCS_SERVER]):
        ray_node.forget()
        for _, process in started:
            process.kill()
    else:
        ray.shutdown()


def _dead_with_last_words(started: ray_node.Started, folder: Path) -> str:
    dead = dead_process(started)
    return dead and f"{dead}\n{_last_words(folder)}"


def _last_words(folder: Path) -> str:
    """The last lines of the logs of Ray's own processes."""
    logs = [log for name in _RAY_LOGS if (log := folder / "session_latest" / "logs" / name).is_file()]
    said = [tail for log in logs if (tail := log_tail(log, log.name, _LOG_TAIL_LINES))]
    return "\n".join(said) or f"(its processes wrote no log below {folder})"


def _own_settings(token_file: Path) -> dict[str, str | None]:
    """Variables that Ray and its processes read; None: not set."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        **ray_node.settings(),
        "RAY_AUTH_MODE": "token",
        _TOKEN_PATH: str(token_file),
        # It would come before the file, and processes that see it could be others' as well.
        "RAY_AUTH_TOKEN": None,
    }


def _new_token(folder: Path) -> Path:
    """A file with a token that only its owner reads; processes get the path, never the token."""
    path = folder / "token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    return path


@contextmanager
def _settings(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process and those it starts, have Ray read them, and put back what was there."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # Ray reads them once, when it is imported, and keeps the token that it read first.
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


def _children_are_waited_for() -> None:
    """Undo what Ray does where it shall end an actor's children: it ignores SIGCHLD, and then a child that failed is
    taken for one that ended well, in this process and in all that it starts."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """A Ray that is started here listens on the loopback address: it takes any other for itself even if that one is
    given."""
    with _settings({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}), ray_node.clusters_off():
        yield


def answers(address: str) -> bool:
    """Whether something takes a Ray client's calls at an address: `ray.init` would try it for a quarter of an hour.

    Raises:
        ConnectionError: no Ray is known on this machine, where the address is `auto`.
        ValueError: it is no address.
    """
    place = services.canonicalize_bootstrap_address(address)
    if place is None:
        raise ConnectionError("no Ray runs on this machine")
    channel = init_grpc_channel(place)
    try:
        with waiting_for(f"the Ray cluster at {place} (--address or RAY_ADDRESS)", _ANSWER_SECONDS):
            grpc.channel_ready_future(channel).result(_ANSWER_SECONDS)
    except grpc.FutureTimeoutError:
        return False
    finally:
        channel.close()
    return True


@contextmanager
def connected(address: str, watch: RayWatch | None = None) -> Iterator[RaySession]:
    """A Ray cluster of somebody else: left as it was found.

    Args:
        address: HOST:PORT.
        watch: is to look at its GCS and at the raylet of this node.

    Raises:
        UserError: not the address of a Ray cluster.
        JobError: no cluster answers there.
    """
    if "://" in address:
        raise UserError(
            f"--address (or RAY_ADDRESS): {address} is no address of a Ray cluster's GCS; use HOST:PORT, and run this "
            "command on a node of the cluster, for example as a Ray job"
        )
    try:
        if not answers(address):
            raise TimeoutError(f"nothing that answers as Ray does within {_ANSWER_SECONDS:g} s")
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ray.exceptions.AuthenticationError, ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        # A wrong token and a cluster that is not there look the same here.
        raise JobError(
            f"--address (or RAY_ADDRESS): no Ray cluster answers at {address}: {error} (one that asks for a token "
            "needs RAY_AUTH_MODE=token, and its token in RAY_AUTH_TOKEN or the file that RAY_AUTH_TOKEN_PATH names)"
        ) from error
    _children_are_waited_for()
    if watch is not None:
        watch.begin(ClusterLook(*ray_node.addresses()))
    try:
        yield RaySession()
    finally:
        if watch is not None:
            watch.close()
        if watch is not None and watch.lost:
            ray_node.forget()
        else:
            ray.shutdown()
