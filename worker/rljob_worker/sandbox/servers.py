"""Addresses of the servers that run programs (`sandbox.isolation: Service`)."""

from __future__ import annotations

from rljob_api.spec import SandboxSpec
from rljob_worker.errors import UserError

ONLY_CLAIMED = (
    "spec.sandbox.service.warmPool: the operator claims the sandboxes, on a cluster; a job started otherwise needs "
    "spec.sandbox.service.urls in its place, or another isolation"
)


def servers(sandbox: SandboxSpec) -> list[str]:
    """The servers' base addresses; none where programs run in processes of the job.

    Raises:
        UserError: they are to come from a warm pool, and no operator has put their addresses there.
    """
    if sandbox.service is None:
        return []
    if sandbox.service.urls is None:
        raise UserError(ONLY_CLAIMED)
    return sandbox.service.urls
