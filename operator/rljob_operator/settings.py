"""Settings of an operator's installation: flags, each with an environment variable of the same name."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from rljob_api.kubernetes_names import is_label_key
from rljob_api.wire.names import DASHBOARD_PORT, DRIVER_PORT
from rljob_operator.render import SET_LABEL_PREFIXES, JobPolicy, RenderSettings

_PREFIX = "RLJOB_"


class SettingsProblem(ValueError):
    """A setting has a value that cannot be used; the message names the flag."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings; seconds are seconds."""

    render: RenderSettings = field(default_factory=RenderSettings)
    namespaces: tuple[str, ...] = ()
    """Watched namespaces; empty: all."""
    operator_namespace: str = "rljob-system"
    """The operator's namespace, in which its Lease is."""
    lease_name: str = "rljob-operator"
    identity: str = field(default_factory=socket.gethostname)
    """Name of this replica: the pod's."""
    lease_seconds: float = 30.0
    """Another replica takes over when the Lease was not renewed for so long."""
    renew_seconds: float = 20.0
    """This replica stops acting when it could not renew for so long."""
    retry_seconds: float = 3.0
    """Between two looks at the Lease."""
    concurrency: int = 64
    """Jobs that are worked on at the same time; most of them wait for a head or a driver."""
    requests: int = 8
    """Requests to the API server at the same time: with 16 KubeRay, which sends one after the other, had to wait behind
    our status writes when many jobs came at once, and the jobs waited for KubeRay."""
    reconcile_seconds: float = 60.0
    """Deadline of looking at one job and carrying out what follows."""
    resync_seconds: float = 900.0
    """Every job is looked at again after so long, without any event."""
    status_seconds: float = 10.0
    """Least time between two status writes of a job when only its progress changed."""
    looks_per_second: float = 20.0
    """Running jobs that are looked at in a second, all together; more than 100 are each looked at less often than every
    5 seconds. At some 5 ms of processor time a look this is a tenth of a core, and limits the status writes too."""
    ask_seconds: float = 5.0
    """Deadline of one request to a job's head or driver."""
    request_seconds: float = 10.0
    """Deadline of one try of a request to the API server."""
    rebuild_seconds: float = 20.0
    """Seconds of one read of a job's step records; after a start, /metrics then answers without them.
    """
    rebuild_total_seconds: float = 120.0
    """Seconds of the reads of all jobs together."""
    stop_seconds: float = 20.0
    """Seconds of running work after SIGTERM."""
    optional_kinds_seconds: float = 300.0
    """Between two looks for Kueue's and Volcano's kinds where they are not there."""
    http_host: str = ""
    """Address of /healthz, /readyz and /metrics; empty: all addresses."""
    http_port: int = 8080
    probe_host: str = "0.0.0.0"
    """Address on which Kopf answers the kubelet's liveness probe; in a pod its own address, of whichever family."""
    probe_port: int = 0
    """Port of that, at /healthz; 0: nowhere."""
    kubeconfig: str | None = None
    context: str | None = None
    """Context of the kubeconfig."""
    ray_address: str = f"http://{{service}}.{{namespace}}.svc:{DASHBOARD_PORT}"
    """Address of a head's dashboard; may hold {service}, {namespace} and {name} (of the job)."""
    driver_address: str = f"http://{{service}}.{{namespace}}.svc:{DRIVER_PORT}"
    """Address of a driver, as `ray_address`."""
    kueue_priority_boost: bool = False
    """Whether Kueue's Workloads get the cost of a preemption (state/preemption.py)."""
    sandbox_claims: bool = False
    """Whether the operator makes SandboxClaims for jobs with `sandbox.service.warmPool`."""
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if not self.retry_seconds < self.renew_seconds < self.lease_seconds:
            raise SettingsProblem(
                f"--retry-seconds {self.retry_seconds:g}, --renew-seconds {self.renew_seconds:g} and --lease-seconds "
                f"{self.lease_seconds:g} must grow in this order: a leader stops acting before another one may begin"
            )
        seconds = ("reconcile_seconds", "resync_seconds", "ask_seconds", "request_seconds")
        for flag in ("concurrency", "requests", "looks_per_second", *seconds):
            if getattr(self, flag) <= 0:
                raise SettingsProblem(f"{_flag(flag)} {getattr(self, flag):g} must be above 0")
        for flag in ("ray_address", "driver_address"):
            try:
                getattr(self, flag).format(service="s", namespace="n", name="j")
            except (KeyError, IndexError, ValueError) as error:
                raise SettingsProblem(
                    f"{_flag(flag)} {getattr(self, flag)!r}: {error} is no part of an address; there are {{service}}, "
                    "{namespace} and {name}"
                ) from None


_TEXTS = {
    "operator_namespace": "namespace of the Lease",
    "lease_name": "name of the Lease",
    "identity": "name of this replica (default: the host's)",
    "http_host": "address of /healthz, /readyz and /metrics",
    "probe_host": "address of Kopf's liveness probe",
    "kubeconfig": "kubeconfig; default: the pod's service account",
    "context": "context of the kubeconfig",
    "ray_address": "address of a head's dashboard, with {service}, {namespace}, {name}",
    "driver_address": "address of a driver's endpoint, with {service}, {namespace}, {name}",
    "log_level": "DEBUG, INFO, WARNING or ERROR",
}
_NUMBERS = {
    "lease_seconds": "another replica takes over after so long",
    "renew_seconds": "stop acting after so long without a renewal",
    "retry_seconds": "between two looks at the Lease",
    "reconcile_seconds": "deadline of looking at one job",
    "resync_seconds": "each job is looked at again after so long",
    "status_seconds": "least time between two writes of progress",
    "looks_per_second": "running jobs that are looked at in a second, all together",
    "ask_seconds": "deadline of a request to a job",
    "request_seconds": "deadline of a request to the API server",
    "rebuild_seconds": "deadline of reading one job's records at a time",
    "rebuild_total_seconds": "deadline of reading all jobs' records after a start",
    "stop_seconds": "for running work after SIGTERM",
    "optional_kinds_seconds": "between two looks for Kueue and Volcano",
}


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings of flags, of variables (RLJOB_LEASE_SECONDS for --lease-seconds) and of defaults, in this order.

    Raises:
        SettingsProblem: a value cannot be used.
    """
    given = vars(_parser(environment).parse_args(arguments))
    render = {
        "worker_image": given.pop("worker_image"),
        "worker_images": _pairs("worker_images", given.pop("worker_images")),
        "kuberay_version": _version("kuberay_version", given.pop("kuberay_version")),
        "ray_version": given.pop("ray_version"),
        "label_prefixes": _prefixes(given.pop("label_prefixes")),
        "policy": _policy(given.pop("policy")),
        "operator_pod_labels": _pairs("operator_pod_labels", given.pop("operator_pod_labels")),
    }
    namespaces = tuple(part.strip() for part in (given.pop("namespaces") or "").split(",") if part.strip())
    kept = {name: value for name, value in given.items() if value is not None}
    operator_namespace = kept.get("operator_namespace", Settings.__dataclass_fields__["operator_namespace"].default)
    known = {name: value for name, value in render.items() if value}
    known["sandbox_claims"] = kept.get("sandbox_claims", False)
    return Settings(
        render=RenderSettings(**known, operator_namespace=operator_namespace), namespaces=namespaces, **kept
    )


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rljob-operator",
        description="Runs RLJobs on this Kubernetes cluster. Each flag has a variable, like RLJOB_NAMESPACES.",
    )

    def add(name: str, text: str, kind: Callable[[str], object] = str) -> None:
        found = environment.get(_PREFIX + name.upper())
        parser.add_argument(_flag(name), type=kind, default=found, help=text, metavar=name.rpartition("_")[2].upper())

    for name, text in _TEXTS.items():
        add(name, text)
    for name, text in _NUMBERS.items():
        add(name, text, float)
    add("concurrency", "jobs that are worked on at the same time", int)
    add("requests", "requests to the API server at the same time", int)
    add("http_port", "port of /healthz, /readyz and /metrics", int)
    add("probe_port", "port of Kopf's liveness probe, /healthz; 0: none", int)
    add("kueue_priority_boost", "true: tell Kueue what the preemption of a job would cost; default: false", _truth)
    add("sandbox_claims", "true: make SandboxClaims for jobs with a warm pool of sandboxes; default: false", _truth)
    add("namespaces", "watched namespaces, with commas between; default: all")
    add("worker_image", "worker image of jobs that name none")
    add("worker_images", "the same by profile: ascend-a2=IMAGE,cpu=IMAGE")
    add("kuberay_version", "version of the KubeRay operator in the cluster, like 1.6.2")
    add("ray_version", "version of Ray in the worker images, like 2.60.0")
    add("label_prefixes", "prefixes of RLJobs' labels that RayClusters get too, with commas between: a.com,b.org")
    add("policy", "what jobs may name, as the chart's values of `policy` in JSON; default: the chart's")
    add("operator_pod_labels", "labels of the operator's pods, for NetworkPolicies: key=value,key=value")
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def _pairs(name: str, text: str | None) -> dict[str, str]:
    pairs = {}
    for part in (text or "").split(","):
        key, equals, value = part.strip().partition("=")
        if part.strip() and not (equals and key and value):
            raise SettingsProblem(f"{_flag(name)}: {part.strip()!r} is no pair; write key=value,key=value")
        if key:
            pairs[key] = value
    return pairs


def _prefixes(text: str | None) -> tuple[str, ...]:
    prefixes = tuple(part.strip().rstrip("/") for part in (text or "").split(",") if part.strip())
    for prefix in prefixes:
        if prefix in SET_LABEL_PREFIXES:
            raise SettingsProblem(f"--label-prefixes: {prefix} is set by the operator, KubeRay, Ray or a queue alone")
        if not is_label_key(f"{prefix}/a"):
            raise SettingsProblem(f"--label-prefixes: {prefix!r} is no prefix of a label; write it like example.com")
    return prefixes


def _policy(text: str | None) -> JobPolicy:
    try:
        return JobPolicy.model_validate_json(text or "{}")
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise SettingsProblem(
            f"--policy: {at or 'the text'}: {first['msg']}; write the chart's values as JSON"
        ) from None


def _version(name: str, text: str | None) -> tuple[int, ...]:
    if not text:
        return ()
    parts = text.removeprefix("v").split(".")
    if len(parts) not in (2, 3) or not all(part.isascii() and part.isdigit() for part in parts):
        raise SettingsProblem(f"{_flag(name)}: {text!r} is no version; write it like 1.6.2")
    return tuple(int(part) for part in parts)
