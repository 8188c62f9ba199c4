"""Faults that a job would find minutes later, when it has pods and devices: ports, folders, arguments, changed data."""

from __future__ import annotations

import ast
import difflib
import errno
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rljob_api import RLJobSpec, derived
from rljob_api.derived import NodeGroup
from rljob_api.how_many import how_many
from rljob_api.profiles import PROFILES
from rljob_api.roles import COMPUTE_VARIABLE
from rljob_api.rules.pods import PROCESS_BYTES, too_many_processes
from rljob_worker.errors import JobError, UserError
from rljob_worker.parallel_layout import check_nodes
from rljob_worker.records.trackers.packages import python_with
from rljob_worker.rewards.source_check import package_places

_ROOM_FOR = 2
"""Checkpoints: a new one is written whole before the oldest is deleted."""


def apply_environment(spec: RLJobSpec) -> None:
    """Give this process, and the reward processes it starts, the manifest's variables and Python path; UserError where
    a part of the path is of an unknown home."""
    _, *paths = package_places(spec)
    os.environ.update(spec.environment.variables)
    sys.path[:0] = paths
    if paths:
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, inherited] if inherited else paths)


def check_port(host: str, port: int | None) -> None:
    """Refuse an address that the driver's HTTP endpoint cannot listen on.

    Raises:
        UserError: this machine has no such address.
        JobError: the port is taken, which may pass.
    """
    if port is None:
        return
    field = f"spec.records.httpPort: {port}" if port else f"spec.records.httpHost: {host}"
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except socket.gaierror as error:
        raise UserError(f"spec.records.httpHost: {host} is no address of this machine: {error.strerror}") from None
    except OSError as error:
        wrong = f"{field}: cannot listen on {host}: {error.strerror}; another port, or 0 for a free one"
        raise (JobError if error.errno == errno.EADDRINUSE else UserError)(wrong) from None


def check_engine_arguments(arguments: list[str]) -> None:
    """Refuse arguments that vLLM does not have, without importing it, which takes seconds."""
    known = engine_argument_names() if arguments else frozenset()
    for name in arguments if known else ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise UserError(f"spec.rollout.engineArgs.{name}: vLLM has no such engine argument{hint}")


def check_layout(spec: RLJobSpec) -> None:
    """Refuse parallel sizes that the nodes cannot be dealt; UserError names the field."""
    try:
        check_nodes(spec.training, derived.trainers_per_node(spec), derived.trainer_nodes(spec))
    except ValueError as error:
        raise UserError(f"spec.{error}") from None


def check_library(spec: RLJobSpec) -> None:
    """Refuse NPUs where torch_npu is not installed, without importing torch, which takes seconds: UserError."""
    profile = spec.resources.profile
    if PROFILES[profile].kind != "npu" or os.environ.get(COMPUTE_VARIABLE) or importlib.util.find_spec("torch_npu"):
        return
    raise UserError(
        f"spec.resources.profile: {profile.value!r} cannot be used here: torch_npu is not installed; use the worker "
        f"image for Ascend, or install the torch_npu that fits torch; with {COMPUTE_VARIABLE}=cpu in the shell the job "
        "computes on the CPU"
    )


def check_processes(spec: RLJobSpec, cores: int, memory: int, groups: Sequence[NodeGroup] | None = None) -> None:
    """Refuse more processes than this machine can run, where its CPU stands for devices.

    Args:
        spec: the job, of one node.
        cores: of this machine, that this process may use.
        memory: bytes of this machine.
        groups: what its node holds; None: trainers and engines.

    Raises:
        UserError: with both numbers.
    """
    if PROFILES[spec.resources.profile].has_devices and os.environ.get(COMPUTE_VARIABLE) != "cpu":
        return
    (group,) = derived.node_groups(spec) if groups is None else groups
    field = "spec.resources." + ("rollout.devicesPerNode" if derived.divides_devices(spec) else "devicesPerNode")
    if wrong := too_many_processes(group, spec.rollout.tensor_parallel, cores):
        raise UserError(f"{field}: {wrong[0]}; allowed: {wrong[1]}")
    cache = spec.rollout.kv_cache_bytes or 0
    # Where nothing is trained, no judge is asked.
    judged = derived.judge_model(spec) is not None and group.trainers
    judges = group.judge_devices or group.engine_devices if judged else 0
    least = PROCESS_BYTES * (group.trainers + group.engine_devices + judges) + cache * group.engine_devices
    if least > memory:
        field = "spec.rollout.kvCacheBytes" if cache * group.engine_devices > memory / 2 else field
        engines = group.engine_devices // spec.rollout.tensor_parallel
        beside = f", {how_many(judges, 'process', 'processes')} of a judge" if judges else ""
        raise UserError(
            f"{field}: {how_many(group.trainers, 'trainer')} and {how_many(engines, 'engine')}"
            f"{beside} take {least / 2**30:.1f} GiB at least, this machine has {memory / 2**30:.1f} GiB; `rljob plan` "
            "says more"
        )


def check_trackers(spec: RLJobSpec) -> None:
    """Refuse trackers whose package this environment lacks."""
    for index, tracker in enumerate(spec.records.trackers):
        if python_with(tracker.name) is None:
            raise UserError(
                f"spec.records.trackers[{index}].name: {tracker.name}: its package is not installed; in a checkout "
                f"`make tracker-packages`, in the worker's image for a cluster pip install 'rljob[{tracker.name}]'"
            )


def engine_argument_names() -> frozenset[str]:
    """Fields of the installed vLLM's `EngineArgs` and `AsyncEngineArgs`; empty without vLLM."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return frozenset()
    source = (Path(package.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    return frozenset(
        field.target.id
        for block in ast.parse(source).body
        if isinstance(block, ast.ClassDef) and block.name in ("EngineArgs", "AsyncEngineArgs")
        for field in block.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def check_room(spec: RLJobSpec, run_folder: Path, checkpoint_bytes: int) -> None:
    """Refuse folders that cannot be written, or are too small for a run's checkpoints.

    Raises:
        UserError: `checkpoint.path` cannot be a folder that is written.
        JobError: there is too little room for two checkpoints, which may change.
    """
    given = spec.checkpoint.path
    field = "spec.checkpoint.path" if given else "--output"
    folder = Path(given) if given else run_folder
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        # A folder that is made for the job is made when the first checkpoint is: a refused job leaves nothing behind.
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"rljob")
            probe.flush()
    except OSError as error:
        raise UserError(f"{field}: {folder}: cannot be written ({existing}): {error.strerror}") from None
    free = shutil.disk_usage(existing).free
    wanted = _ROOM_FOR * checkpoint_bytes
    if free < wanted:
        raise JobError(
            f"{field}: {folder}: {free / 2**30:.1f} GiB are free; {_ROOM_FOR} checkpoints of this model need "
            f"{wanted / 2**30:.1f} GiB (a new one is whole before the oldest is deleted)"
        )
