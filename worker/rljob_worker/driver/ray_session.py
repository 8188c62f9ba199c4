"""The Ray that a job runs on: one of its own, or a cluster that is already there."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from rljob_api import RLJobSpec, derived
from rljob_worker.driver.placement import bundle_cpus
from rljob_worker.errors import JobError, UserError
from rljob_worker.rollout.guardian import start_time
from rljob_worker.rollout.processes import Guardian

_RAY_FOLDER = "rljob-ray-"


@dataclass(frozen=True)
class RaySession:
    """A Ray that can be used."""

    scratch: Path | None = None
    """Folder for scratch files that goes with a Ray of this job alone."""
    settled: Callable[[], None] = lambda: None
    """To be called once the job's processes have all started."""


@contextmanager
def embedded(spec: RLJobSpec) -> Iterator[RaySession]:
    """A Ray on this machine for this job alone."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray makes its workers nice by default: beside anything else on the machine they would get a fraction of it.
    os.environ["RAY_worker_niceness"] = "0"
    # SIGKILL of an actor must not leave the engine's own child processes behind.
    os.environ["RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"] = "true"
    _sweep_ray_folders()
    # Ray's agents outlive a killed driver for minutes.
    guardian = Guardian()
    folder = Path(tempfile.gettempdir()) / f"{_RAY_FOLDER}{os.getpid()}-{start_time(os.getpid())}"
    folder.mkdir(mode=0o700)
    try:
        ray.init(
            address="local",
            num_cpus=derived.devices(spec) * bundle_cpus(spec),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _temp_dir=str(folder),
        )
        yield RaySession(folder, guardian.settled)
    finally:
        ray.shutdown()
        guardian.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def connected(address: str) -> Iterator[RaySession]:
    """A Ray cluster of somebody else: left as it was found.

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
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise JobError(f"no Ray cluster answers at {address}: {error}") from error
    try:
        yield RaySession()
    finally:
        ray.shutdown()


def _sweep_ray_folders() -> None:
    """Remove what drivers of this user left that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_RAY_FOLDER}*-*"):
        pid, _, started = folder.name.removeprefix(_RAY_FOLDER).partition("-")
        if pid.isdigit() and start_time(int(pid)) != started:
            shutil.rmtree(folder, ignore_errors=True)
