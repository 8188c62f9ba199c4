"""Kopf's settings, each with its reason: it only lists and watches here, and writes nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import kopf

from rljob_operator.shell.caches.informer import LONGEST_SHARE, Informer, WatchTimes


class Backoffs:
    """Pauses between the tries of Kopf's own requests: they grow, and never end.

    A request that Kopf gives up ends the operator. It takes any iterable and begins it anew for each request.
    """

    def __init__(self, times: WatchTimes) -> None:
        self._times = times

    def __iter__(self) -> Iterator[float]:
        seconds = self._times.first_pause
        while True:
            yield seconds
            seconds = min(2 * seconds, self._times.longest_pause)


class NoDiffBase(kopf.DiffBaseStorage):
    """Kopf copies each object deeply, twice, to see what changed since it was handled last; nobody asks here."""

    def build(self, *, body: kopf.Body, extra_fields: object = None) -> kopf.BodyEssence:  # noqa: D102
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:  # noqa: D102
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:  # noqa: D102
        raise AssertionError("nothing is stored on objects")


class NoProgress(kopf.ProgressStorage):
    """No handler of ours has progress that would be stored on an object."""

    def fetch(self, *, key: str, body: kopf.Body) -> kopf.ProgressRecord | None:  # noqa: D102
        return None

    def store(self, *, key: str, record: kopf.ProgressRecord, body: kopf.Body, patch: kopf.Patch) -> None:  # noqa: D102
        raise AssertionError("nothing is stored on objects")

    def purge(self, *, key: str, body: kopf.Body, patch: kopf.Patch) -> None:  # noqa: D102
        pass

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None:  # noqa: D102
        pass

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:  # noqa: D102
        return essence


def kopf_settings(informers: Iterable[Informer], times: WatchTimes, request_seconds: float) -> kopf.OperatorSettings:
    """Settings for an operator that only listens.

    Args:
        informers: whose selectors the API server is asked to apply.
        times: limits of the watches.
        request_seconds: deadline of a request to the API server.
    """
    settings = kopf.OperatorSettings()
    # An int: "300.0" is a bad request to a real API server.
    settings.watching.server_timeout = max(1, round(times.server))
    settings.watching.client_timeout = times.server + times.inactivity
    settings.watching.connect_timeout = request_seconds
    # Ours comes first, and lists again. Kopf's would watch on from the same version.
    settings.watching.inactivity_timeout = 2 * times.inactivity
    settings.watching.reconnect_backoff = min(times.first_pause, 0.1)
    # Pages: else a list is in memory whole, in the API server too.
    settings.watching.chunk_size = 100
    for informer in informers:
        if informer.selector:
            kind = (informer.resource.group, informer.resource.version, informer.resource.plural)
            settings.watching.label_selectors[kind] = informer.selector
    # A pause of ours, before Kopf hears that a list has to begin anew, counts as part of the request.
    settings.networking.request_timeout = 3 * request_seconds + LONGEST_SHARE * times.longest_pause
    settings.networking.connect_timeout = request_seconds
    settings.networking.error_backoffs = Backoffs(times)
    # A worker holds its object while it waits for another event of it; 0 would let workers turn in a circle.
    # No worker_limit: what waits for a worker is held too.
    settings.queueing.idle_timeout = 0.05
    settings.queueing.exit_timeout = 1.0
    # The CRDs of a cluster are megabytes each, and to see them is a right that the operator has no other need for.
    settings.scanning.disabled = True
    # Our Events are counted where they are equal, and limited for each job.
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()
    # Kopf takes its finalizer off every object that it watches and has no deletion handler for. With the default name
    # it would take away those of other operators that are written with Kopf.
    settings.persistence.finalizer = "rljob.dev/kopf"
    # Kubernetes kills a pod that does not end.
    settings.process.ultimate_exiting_timeout = None
    # "Handler 'x' succeeded." for each event.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    return settings
