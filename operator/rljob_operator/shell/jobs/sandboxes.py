"""SandboxClaims of one job: read by its label, made and deleted by name."""

from __future__ import annotations

from typing import cast

from rljob_operator.kubernetes_objects import Condition, Manifest, ObjectList, SandboxClaimObject
from rljob_operator.render import render_claim
from rljob_operator.shell.api.client import ApiClient, ApiError
from rljob_operator.shell.api.owners import controller_uid
from rljob_operator.shell.api.resources import JOB_LABEL, SANDBOX_CLAIMS
from rljob_operator.state.observed import JobView, SandboxesView, SandboxView

_ENDS = frozenset({"ClaimExpired", "SandboxExpired", "PodFailed", "PodSucceeded"})
"""Reasons of a `Ready` condition that stay: agent-sandbox gives such a claim no other sandbox."""


async def read_claims(client: ApiClient, job: JobView) -> SandboxesView:
    """The claims with the job's label, or why there is no answer: no such kind, no right."""
    try:
        answer = await client.request(
            "GET", SANDBOX_CLAIMS.path(job.namespace), params={"labelSelector": f"{JOB_LABEL}={job.name}"}
        )
    except ApiError as error:
        return SandboxesView(problem=str(error), passing=error.code not in (403, 404))
    items = cast("ObjectList[SandboxClaimObject]", answer).get("items") or []
    return SandboxesView(tuple(claim_view(item, job.uid) for item in items))


def claim_view(item: SandboxClaimObject, uid: str) -> SandboxView:
    """View of a claim by the job with this UID."""
    meta, status = item["metadata"], item.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    unknown: Condition = {"type": ""}
    ready, finished = conditions.get("Ready", unknown), conditions.get("Finished", unknown)
    reason = str(ready.get("reason") or "")
    addresses = (status.get("sandbox") or {}).get("podIPs") or []
    good = ready.get("status") == "True"
    return SandboxView(
        name=meta["name"],
        uid=str(meta["uid"]),
        owned=controller_uid(item) == uid,
        address=addresses[0] if addresses else "",
        ready=good,
        ended=finished.get("status") == "True" or (not good and reason in _ENDS),
        deleting=meta.get("deletionTimestamp") is not None,
        reason="" if good else reason,
        message="" if good else str(ready.get("message") or ""),
    )


async def make_claims(client: ApiClient, job: JobView, names: tuple[str, ...]) -> int:
    """Make claims; one that is there already is seen at the next look. Returns the number of those made.

    Raises:
        ApiError: one was refused.
    """
    made = 0
    for name in names:
        body: Manifest = render_claim(job, name)
        try:
            await client.create(SANDBOX_CLAIMS, job.namespace, body, strict=True)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            found = await client.get(SANDBOX_CLAIMS, job.namespace, name)
            if controller_uid(found) != job.uid:
                text = f"SandboxClaim {name} exists and is not this job's; delete it, or give the job another name"
                raise ApiError(409, "AlreadyExists", text) from None
        else:
            made += 1
    return made


async def delete_claims(client: ApiClient, job: JobView, claims: tuple[tuple[str, str], ...]) -> int:
    """Delete claims, never others of their names. Returns the number of requests that were obeyed.

    Raises:
        ApiError: one was refused.
    """
    gone = 0
    for name, uid in claims:
        try:
            await client.delete(SANDBOX_CLAIMS, job.namespace, name, uid)
        except ApiError as error:
            if error.code not in (404, 409):
                raise
        else:
            gone += 1
    return gone
