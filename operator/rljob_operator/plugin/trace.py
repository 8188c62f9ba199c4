"""A job's trace: what its pods and attempts did, from the cluster's objects, beside what its driver recorded."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rljob_api.wire.trace_events import Lane, TraceEvents, json_text
from rljob_operator.kubernetes_objects import Condition, EventObject, PodObject
from rljob_operator.ray.http import NoAnswer
from rljob_operator.state.observed import JobView
from rljob_operator.state.timing import seconds_of

LARGEST_BYTES = 1 << 28
"""Largest size of a driver's trace, unpacked."""
_CLUSTER = 0
"""The group of lanes before those of the driver's attempts, which begin with 1."""
Span = tuple[float, float, str, Mapping[str, Any]]
"""Begin and end in Unix seconds, name, and what else is said of it."""


class DriverTrace:
    """A trace as a driver answers it.

    Args:
        packed: by gzip.

    Raises:
        NoAnswer: it is none.
    """

    def __init__(self, packed: bytes) -> None:
        try:
            with gzip.open(io.BytesIO(packed)) as file:
                content = file.read(LARGEST_BYTES + 1)
            if len(content) > LARGEST_BYTES:
                raise ValueError(f"it has more than {LARGEST_BYTES} bytes")
            document = json.loads(content)
            self.origin = float(document["otherData"]["origin_unix_seconds"])
            self.events = [event for event in document["traceEvents"] if isinstance(event, dict)]
        except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise NoAnswer(f"The driver answered what is no trace: {error}") from None


def cluster_trace(
    job: JobView,
    pods: Sequence[PodObject],
    events: Sequence[EventObject],
    driver: DriverTrace | None,
    now: float,
) -> list[str]:
    """The trace of a job on a cluster, in pieces of text.

    Times are those of their writers: API server, scheduler, kubelets and driver, whose clocks the nodes keep together.

    Args:
        job: the RLJob.
        pods: of its RayCluster, as they are now; those that are gone are not known.
        events: about job and pods.
        driver: what the driver recorded; None: it cannot be asked.
        now: Unix seconds: what goes on ends there.
    """
    origin = min([job.created, *([driver.origin] if driver is not None else [])])
    trace = TraceEvents(origin)
    trace.process(_CLUSTER, f"cluster: RLJob {job.name}")
    _draw(trace, trace.lane(_CLUSTER, "job"), "job", _attempts(job, now), now)
    _instants(trace, trace.lane(_CLUSTER, "events of the job"), [e for e in events if _about(e) == job.uid])
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        own = [event for event in events if _about(event) == pod["metadata"].get("uid")]
        name = str(pod["metadata"]["name"])
        _draw(trace, trace.lane(_CLUSTER, name), "pod", pod_spans(pod, own, now), now)
        _instants(trace, trace.lane(_CLUSTER, f"events of {name}"), own)
    if driver is not None:
        shift = round((driver.origin - origin) * 1e6)
        for event in driver.events:
            moved = {**event, "ts": event["ts"] + shift} if isinstance(event.get("ts"), int) else event
            trace.add(json_text(moved))
    return list(trace.pieces({"job": job.name, "namespace": job.namespace}))


def pod_spans(pod: PodObject, events: Sequence[EventObject], now: float) -> list[Span]:
    """A pod's time: for a node, for its image, its init containers, its containers before and after a restart."""
    told, created = pod.get("status") or {}, pod["metadata"].get("creationTimestamp")
    spans: list[Span] = []
    conditions: Mapping[str, Condition] = {one["type"]: one for one in told.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled")
    if created is not None:
        placed = scheduled is not None and scheduled.get("status") == "True"
        until = _time(scheduled.get("lastTransitionTime")) if scheduled is not None and placed else None
        spans.append((seconds_of(str(created)), now if until is None else until, "waits for a node", {}))
    spans += _pulls(events, now)
    statuses = [*(told.get("initContainerStatuses") or ()), *(told.get("containerStatuses") or ())]
    for container in statuses:
        for state in (container.get("lastState"), container.get("state")):
            content: Mapping[str, Any] = state or {}
            for kind in ("terminated", "running"):
                said = content.get(kind) or {}
                begin = _time(said.get("startedAt"))
                if begin is not None:
                    how = {key: said[key] for key in ("reason", "exitCode") if key in said}
                    end = _time(said.get("finishedAt"))
                    spans.append((begin, now if end is None else end, f"container {container['name']}", how))
    return spans


def _pulls(events: Sequence[EventObject], now: float) -> list[Span]:
    """From `Pulling` to `Pulled` or `Failed`, as the kubelet tells them."""
    spans: list[Span] = []
    begun: tuple[float, str] | None = None
    for event in sorted(events, key=_when):
        reason, message = event.get("reason"), str(event.get("message") or "")
        if reason == "Pulling":
            begun = _when(event), message
        elif reason in ("Pulled", "Failed") and begun is not None:
            spans.append((begun[0], _when(event), "image pull", {"message": message}))
            begun = None
    return [*spans, (begun[0], now, "image pull", {"message": begun[1]})] if begun is not None else spans


def _attempts(job: JobView, now: float) -> list[Span]:
    """Waiting and running by turns, as the operator's status has them."""
    spans: list[Span] = []
    before, waits = job.created, "queued and starting"
    for attempt in job.status.attempts:
        begin = _time(attempt.start_time)
        if begin is None:
            continue
        spans.append((before, begin, waits, {}))
        end = _time(attempt.end_time)
        told = {"reason": attempt.reason, "message": attempt.message, "exit code": attempt.exit_code}
        said = {key: value for key, value in told.items() if value is not None}
        spans.append((begin, now if end is None else end, f"attempt {attempt.number}", said))
        if end is None:
            return spans
        before, waits = end, "restart"
    if job.status.phase not in ("Succeeded", "Failed"):
        spans.append((before, now, waits, {}))
    return spans


def _draw(trace: TraceEvents, lane: Lane, kind: str, spans: Sequence[Span], now: float) -> None:
    """Slices side by side: where two would overlap, the later one begins when the earlier one ends."""
    last = 0
    for begin, end, name, said in sorted(spans, key=lambda span: (span[0], span[1])):
        first = max(trace.at(begin), last, 0)
        last = max(trace.at(min(end, now)), first)
        trace.slice(lane, name, kind, first, last, json_text(said))


def _instants(trace: TraceEvents, lane: Lane, events: Sequence[EventObject]) -> None:
    for event in sorted(events, key=_when):
        said = {"message": str(event.get("message") or "")}
        trace.instant(lane, str(event.get("reason") or "event"), max(0, trace.at(_when(event))), said)


def _about(event: EventObject) -> str:
    return str(event["involvedObject"].get("uid"))


def _when(event: EventObject) -> float:
    """When it was last seen."""
    series = event.get("series") or {}
    last = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return seconds_of(str(last or event["metadata"].get("creationTimestamp") or "1970-01-01T00:00:00Z"))


def _time(text: object) -> float | None:
    return seconds_of(text) if isinstance(text, str) and text else None
