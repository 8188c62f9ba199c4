"""What looks on while a job runs: profiles of steps, trackers, collectors of traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from rljob_api import derived
from rljob_api.rules.findings import Check, Finding
from rljob_api.spec import OtlpSpec, RLJobSpec, TrackerSpec

_OVER_HTTP = ("wandb", "clearml", "swanlab")
"""Trackers whose servers have no other address."""


def _profile(spec: Any) -> Iterator[Finding]:
    """Processes and steps that a job does not have."""
    profile, at = spec.records.profile, ("records", "profile")
    if profile is None:
        return
    most = derived.engine_node_bounds(spec)[1] * derived.engines_per_node(spec)
    for field, numbers, count in (("ranks", profile.ranks, derived.trainers(spec)), ("engines", profile.engines, most)):
        for i, number in enumerate(numbers):
            # The default names the first, which every job has.
            if number and number >= count:
                yield Finding((*at, field, i), f"is none of the job's, which has {count}", f"0 to {count - 1}")
    if not profile.ranks and not profile.engines:
        yield Finding(at, "names neither ranks nor engines", "one of either at least")
    if profile.first_step > spec.steps:
        yield Finding((*at, "firstStep"), f"is behind the last of the job's {spec.steps} steps", f"1 to {spec.steps}")


def _endpoint(otlp: Any) -> Iterator[Finding]:
    if wrong := _address_fault(otlp.endpoint):
        yield Finding(("endpoint",), wrong, "like http://collector:4318")


def _tracker(tracker: Any) -> Iterator[Finding]:
    if tracker.url is None:
        return
    if tracker.name in _OVER_HTTP and not tracker.url.lower().startswith(("http://", "https://")):
        yield Finding(("url",), f"is no address that {tracker.name} can reach", "one with http:// or https://")
    elif tracker.url.lower().startswith("http") and (wrong := _address_fault(tracker.url)):
        yield Finding(("url",), wrong, "like https://server.example:8080")


def _address_fault(address: str) -> str:
    """What is wrong with an address; empty where nothing is."""
    try:
        parts = urlsplit(address)
        if parts.port == 0:
            return "has no port that could be reached"
    except ValueError as error:
        return f"is no address: {error}"
    return "" if parts.hostname else "names no host"


OBSERVED_CHECKS: dict[type, tuple[Check, ...]] = {
    RLJobSpec: (_profile,),
    OtlpSpec: (_endpoint,),
    TrackerSpec: (_tracker,),
}
