"""Addresses: of the servers that a job reports to, and its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rljob_api.rules.findings import Check, Finding, address_fault, one_line
from rljob_api.spec import OtlpSpec, RecordsSpec, TrackerSpec

_TRACES = "/v1/traces"
_RAY_PORTS = {6379: "GCS", 8265: "dashboard", 10001: "client server", 52365: "agent"}


def _otlp(otlp: Any) -> Iterator[Finding]:
    if otlp.endpoint.rstrip("/").endswith(_TRACES):
        yield Finding(("endpoint",), f"ends with {_TRACES}, which is added to it", "the address before it")


def _tracker(tracker: Any) -> Iterator[Finding]:
    # MLflow's may be a database or a folder.
    if tracker.url is None or tracker.name == "mlflow":
        return
    if not tracker.url.startswith(("http://", "https://")):
        yield Finding(("url",), f"is no address of a {tracker.name} server", "http:// or https://")
    elif wrong := address_fault(tracker.url):
        yield Finding(("url",), wrong, "like https://tracker.example:8080")


def _records(records: Any) -> Iterator[Finding]:
    if records.http_port in _RAY_PORTS:
        wrong = f"is the port of Ray's {_RAY_PORTS[records.http_port]} on the same machine"
        yield Finding(("httpPort",), wrong, "another port, or 0 for a free one")
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f:.]+", records.http_host) or re.fullmatch(
        r"[^:]*:[0-9]+", records.http_host
    ):
        yield Finding(("httpHost",), "is no address or host name", "like 127.0.0.1, without scheme and port")
    elif re.fullmatch("[0-9.]+", records.http_host) and not _is_ipv4(records.http_host):
        yield Finding(("httpHost",), "is no address: four numbers up to 255 are one", "like 127.0.0.1")


def _is_ipv4(host: str) -> bool:
    parts = host.split(".")
    return len(parts) == 4 and all(part.isdecimal() and int(part) < 256 for part in parts)


ADDRESS_CHECKS: dict[type, tuple[Check, ...]] = {
    OtlpSpec: (_otlp,),
    RecordsSpec: (_records,),
    TrackerSpec: (one_line("project", "run", "workspace"), _tracker),
}
