"""Host memory, /dev/shm and storage of a node."""

from __future__ import annotations

from rljob_api.how_many import how_many
from rljob_api.quantities import to_number
from rljob_api.wanted import Wanted
from rljob_worker.doctor.facts import NodeFacts
from rljob_worker.doctor.findings import Finding, not_applicable, ok, problem, warning
from rljob_worker.doctor.units import size

_LEAST_SHARED = 1 << 30
"""Bytes: half is Ray's object store, the rest vLLM's queues, HCCL's counters and the weight hand-over."""
_DOCKER_SHARED = 64 << 20
"""Docker's default for a container: vLLM and Ray fail on it."""
_HOST_BYTES = 2 << 30
"""A trainer and an engine that have imported their libraries take about 1 GiB each."""


def check(facts: NodeFacts, wanted: Wanted | None) -> list[Finding]:
    """All of it."""
    return [_shared(facts, wanted), _ipc(facts), _host(facts, wanted), _model(facts), _runs(facts)]


def _shared(facts: NodeFacts, wanted: Wanted | None) -> Finding:
    name, found = "/dev/shm", f"{size(facts.shared_memory_free)} free of {size(facts.shared_memory_total)}"
    fix = "raise spec.storage.sharedMemory (in Docker: --shm-size or --ipc=host)"
    given = to_number(wanted.shared_memory) if wanted is not None and wanted.shared_memory else 0
    if facts.shared_memory_total < given:
        return problem(
            name, found, f"{size(given)} (spec.storage.sharedMemory)", "this machine gives less than the job asks for"
        )
    if facts.shared_memory_total <= _DOCKER_SHARED:
        return problem(name, found, size(_LEAST_SHARED), fix)
    need = max(_LEAST_SHARED, wanted.staging_bytes if wanted is not None else 0)
    if facts.shared_memory_free < need:
        left = "" if facts.shared_memory_total < need else "; files of dead processes may be left in it (`ls /dev/shm`)"
        return warning(name, found, size(need), fix + left)
    return ok(name, found, size(need))


def _ipc(facts: NodeFacts) -> Finding:
    name, wanted = "memory between processes", "two processes see each other's bytes"
    if facts.shared_memory_ipc:
        fix = "/dev/shm must be writable, and one IPC and mount namespace for the job's processes"
        return problem(name, facts.shared_memory_ipc, wanted, fix)
    return ok(name, "shared through /dev/shm", wanted)


def _host(facts: NodeFacts, wanted: Wanted | None) -> Finding:
    name, found = "host memory", f"{size(facts.host_free)} free of {size(facts.host_total)}"
    devices = wanted.devices if wanted is not None and wanted.devices is not None else 1
    need = devices * _HOST_BYTES
    fix = "raise spec.resources.worker.memory, or end what else runs here; `rljob plan` says what the job takes"
    if facts.host_free < need:
        each = how_many(devices, "device")
        return warning(name, found, f"{size(need)} for the trainers and engines of {each}, without the model", fix)
    return ok(name, found, size(need))


def _model(facts: NodeFacts) -> Finding:
    name, place = "model folder", facts.model
    if place is None:
        return not_applicable(name, "no absolute path is named (spec.model.path)")
    if not place.exists:
        fix = "mount it with spec.storage.volumes: the path is the one inside the pods, the same on every node"
        return problem(name, f"{place.path} is not there", "the folder on every node", fix)
    return ok(name, place.path, "the folder on every node")


def _runs(facts: NodeFacts) -> Finding:
    name, wanted, place = "run folder", "a folder that can be written to", facts.runs
    if place is None:
        return not_applicable(name, "no absolute path is named (spec.checkpoint.path)")
    if not place.writable:
        fix = "let the pods' user write there (owner, fsGroup, no readOnly), or name another spec.checkpoint.path"
        return problem(name, f"{place.base} cannot be written to", wanted, fix)
    return ok(name, place.path if place.exists else f"{place.path}, to be made in {place.base}", wanted)
