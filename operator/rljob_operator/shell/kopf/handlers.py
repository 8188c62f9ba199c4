"""Handlers that Kopf calls: at its start and end, to log in, when asked how it is, and for each event.

Handlers are async although some wait for nothing (Kopf sends plain functions to threads), and those of events return
nothing (Kopf writes what they return into the object's status).
"""

from __future__ import annotations

import kopf


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(memo: kopf.Memo, **_: object) -> None:
    """Serve /metrics, stand by for the Lease, and work while it is ours."""
    await memo.operator.begin()


@kopf.on.login(backoff=1.0)
async def log_in(memo: kopf.Memo, **_: object) -> kopf.AiohttpSession:
    """Give Kopf the session that it lists and watches with; again after a 401, with the token as it is then."""
    return await memo.kopf.log_in()


@kopf.on.event("rljobs.rljob.dev")
@kopf.on.event("rayclusters.ray.io")
@kopf.on.event("", "v1", "pods")
@kopf.on.event("networkpolicies.networking.k8s.io")
@kopf.on.event("workloads.kueue.x-k8s.io")
@kopf.on.event("podgroups.scheduling.volcano.sh")
async def learn(
    event: kopf.RawEvent, resource: kopf.Resource, namespace: str | None, memo: kopf.Memo, **_: object
) -> None:
    """Keep the caches as the cluster is; a job that this changes is put into the queue.

    Objects of lists come this way, and events while a list is taken in; all others go from the transport to the caches.
    """
    memo.informers.take(resource.group, resource.plural, namespace, event)


@kopf.on.probe(id="watches")
async def probe(memo: kopf.Memo, **_: object) -> str:
    """Liveness probe: report what the watches of the process lack."""
    return memo.informers.problem or "ok"


@kopf.on.cleanup(errors=kopf.ErrorsMode.PERMANENT)
async def end(memo: kopf.Memo, **_: object) -> None:
    """Finish what runs, and give the Lease back."""
    await memo.operator.end()
