"""The request to Ray's job API: the driver's command line and its manifest."""

from __future__ import annotations

import base64
import gzip
import json
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from rljob_api import derived
from rljob_api.job import GROUP, KIND, VERSION
from rljob_api.quantities import to_cores
from rljob_api.spec import RLJobSpec, SandboxSpec
from rljob_api.wire.names import ATTEMPT_VARIABLE, MANIFEST_VARIABLE
from rljob_api.wire.run_status import SUMMARY_FILE, SUMMARY_OF_SUCCESS
from rljob_operator.kubernetes_objects import Manifest, block_of
from rljob_operator.render.errors import RenderError
from rljob_operator.render.hardware import resolve
from rljob_operator.render.pods import worker_size
from rljob_operator.render.ray_cluster import valid_spec
from rljob_operator.render.settings import RenderSettings
from rljob_operator.render.volumes import RUN_ROOT
from rljob_operator.state.attempts import submission_id
from rljob_operator.state.observed import JobView
from rljob_operator.state.sandboxes import warm_pool
from rljob_operator.state.timing import LINGER_SECONDS

MAX_MANIFEST_BYTES = 96 * 1024
"""Linux allows 128 KiB for one variable."""
_SURELY_FITS = MAX_MANIFEST_BYTES // 2
"""Bytes that fit in any case when packed: gzip adds 23 bytes to what it cannot pack, base64 a third."""

_OUTLIVE_THE_DRIVER = "trap : TERM"
"""Ray asks every process of the job to stop. Without it the shell would go before the driver, nobody would take the
driver's exit status (the head's first process is no init), and Ray would wait for it for the whole stop time."""


def run_folder(job: JobView) -> str:
    """The job's run folder in the pods."""
    spec = valid_spec(job)
    root = PurePosixPath(spec.checkpoint.path or RUN_ROOT)
    return str(root / job.namespace / f"{job.name}-{job.uid[:8]}")


def submission(
    job: JobView, attempt: int, settings: RenderSettings, sandboxes: Sequence[str] | None = None
) -> Manifest:
    """The body of `POST /api/jobs/` for an attempt, from 0; `sandboxes` as in `driver_manifest`."""
    folder = shlex.quote(run_folder(job))
    decode = f"printenv {MANIFEST_VARIABLE} | base64 -d | gunzip"
    run = f"{decode} | rljob run - --output {folder} --resume auto"
    return {
        "entrypoint": f"{_OUTLIVE_THE_DRIVER}; {run} && {_is_done(folder)}",
        "submission_id": submission_id(job.uid, attempt),
        "runtime_env": {
            "env_vars": {MANIFEST_VARIABLE: encoded_manifest(job, settings, sandboxes), ATTEMPT_VARIABLE: str(attempt)}
        },
        "metadata": {"rljob": f"{job.namespace}/{job.name}", "uid": job.uid, "attempt": str(attempt)},
        "entrypoint_num_cpus": 0,
    }


def _is_done(folder: str) -> str:
    """A driver that ends with 0 without having written that the job is done, for whatever reason, has failed."""
    said = "rljob: the driver ended before it had written that the job is done"
    return f"{{ grep -qs '{SUMMARY_OF_SUCCESS}' {folder}/{SUMMARY_FILE} || {{ echo '{said}'; exit 1; }}; }}"


def encoded_manifest(job: JobView, settings: RenderSettings, sandboxes: Sequence[str] | None = None) -> str:
    """base64(gzip(JSON)) of the manifest that the driver gets; equal for equal jobs."""
    text = json.dumps(driver_manifest(job, settings, sandboxes), separators=(",", ":"))
    # mtime 0: the same job gives the same bytes, whenever it is submitted.
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def check_manifest(job: JobView, settings: RenderSettings) -> None:
    """Refuse a manifest that is too large for an environment variable."""
    manifest = driver_manifest(job, settings)
    if len(json.dumps(manifest)) <= _SURELY_FITS:
        return
    encoded = encoded_manifest(job, settings)
    if len(encoded) > MAX_MANIFEST_BYTES:
        spec = block_of(manifest, "spec")
        sizes = {f"spec.{name}": len(json.dumps(value)) for name, value in spec.items()}
        largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:3]
        listed = ", ".join(f"{name} ({sizes[name]} bytes)" for name in largest)
        raise RenderError(
            largest[0],
            f"the manifest has {len(encoded)} bytes when packed, {MAX_MANIFEST_BYTES} fit; the largest are {listed}; "
            "put long texts into files of a volume",
        )


def driver_manifest(job: JobView, settings: RenderSettings, sandboxes: Sequence[str] | None = None) -> Manifest:
    """The RLJob as the driver gets it: its checkpoints in the run folder, its endpoint where the operator looks.

    Args:
        job: the job.
        settings: the operator's.
        sandboxes: addresses of the sandboxes of its warm pool; None: they are not known yet, and an address of the
            greatest length stands for each.
    """
    spec = valid_spec(job)
    records = spec.records.model_copy(
        update={
            "http_port": settings.driver_port,
            "http_host": "0.0.0.0",
            "linger_seconds": spec.records.linger_seconds or LINGER_SECONDS,
        }
    )
    checkpoint = spec.checkpoint.model_copy(update={"path": None})
    resources = spec.resources.model_copy(update={"threads_per_device": _threads(spec)})
    given = spec.model_copy(
        update={"records": records, "checkpoint": checkpoint, "resources": resources, **_sandbox(spec, sandboxes)}
    )
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": job.name, "namespace": job.namespace, "uid": job.uid},
        # A driver of the version before would refuse a field that it does not know: defaults do not go along, nor what
        # is the operator's alone. Nulls stay where they replace another default.
        "spec": given.model_dump(
            mode="json", by_alias=True, exclude_defaults=True, exclude={"timeouts": {"ready_seconds"}}
        ),
    }


def _sandbox(spec: RLJobSpec, sandboxes: Sequence[str] | None) -> dict[str, SandboxSpec]:
    """The sandbox with its servers' addresses in place of the warm pool, which only the operator can use."""
    pool = warm_pool(spec)
    if pool is None:
        return {}
    assert spec.sandbox is not None
    assert spec.sandbox.service is not None
    known = [f"http://[2001:db8:0:0:0:0:0:{index:x}]:{pool.port}" for index in range(pool.count)]
    urls = known if sandboxes is None else list(sandboxes)
    service = spec.sandbox.service.model_copy(update={"urls": urls, "warm_pool": None})
    return {"sandbox": spec.sandbox.model_copy(update={"service": service})}


def _threads(spec: RLJobSpec) -> int:
    # In a pod the worker would count the node's cores, of which it may use those of its limit.
    if spec.resources.threads_per_device is not None:
        return spec.resources.threads_per_device
    profile = resolve(spec)
    shares = [to_cores(worker_size(spec, profile, own).cpu) // own.devices for own in derived.node_groups(spec)]
    return profile.tuning.omp_num_threads or max(1, min(shares))
