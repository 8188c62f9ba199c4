"""Addresses of servers that a job reports to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob_api.rules.findings import Check, Finding, address_fault
from rljob_api.spec import OtlpSpec, TrackerSpec

_TRACES = "/v1/traces"


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


ADDRESS_CHECKS: dict[type, tuple[Check, ...]] = {OtlpSpec: (_otlp,), TrackerSpec: (_tracker,)}
