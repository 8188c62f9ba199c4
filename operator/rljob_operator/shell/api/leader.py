"""Only one replica acts: the one that holds the Lease."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import cast

from rljob_operator.kubernetes_objects import LeaseObject, LeaseSpec, Manifest
from rljob_operator.settings import Settings
from rljob_operator.shell.api.client import ApiClient, ApiError
from rljob_operator.shell.api.resources import LEASES

logger = logging.getLogger(__name__)


class LeadershipLost(Exception):
    """The Lease was not renewed in time, or is another replica's."""


class LeaderElection:
    """Takes, keeps and gives back the Lease.

    A leader's right to act ends `renew_seconds` after the *start* of its last successful renewal, by its own clock;
    another replica waits for `lease_seconds`, by its own clock, from when it saw that renewal, which is later. So the
    one has stopped before the other begins, whatever the wall clocks say.

    Args:
        client: the API server.
        settings: name, identity and times.
    """

    def __init__(self, client: ApiClient, settings: Settings) -> None:
        self._client = client
        self._settings = settings
        self._acts_until = 0.0
        self._lease: LeaseObject | None = None
        self._seen: str | None = None
        self._seen_at = 0.0

    @property
    def leads(self) -> bool:
        """Whether this replica may act now."""
        return time.monotonic() < self._acts_until

    def check(self) -> None:
        """Raise LeadershipLost unless this replica may act now."""
        if not self.leads:
            raise LeadershipLost("the Lease was not renewed in time")

    async def acquire(self) -> None:
        """Wait until this replica leads."""
        said = ""
        while True:
            try:
                holder = await self._try_to_take()
                if holder is None:
                    logger.info("leading as %s", self._settings.identity)
                    return
                if holder != said:
                    logger.info("standing by, %s leads", holder)
                    said = holder
            except ApiError as error:
                logger.warning("the Lease cannot be read or taken: %s", error)
            await asyncio.sleep(self._settings.retry_seconds)

    async def hold(self) -> None:
        """Renew the Lease for good.

        Raises:
            LeadershipLost: it could not be renewed in time, or another replica has it.
        """
        while True:
            await asyncio.sleep(min(self._settings.retry_seconds, max(0.0, self._acts_until - time.monotonic())))
            left = self._acts_until - time.monotonic()
            if left <= 0:
                raise LeadershipLost(f"the Lease was not renewed within {self._settings.renew_seconds:g} s")
            try:
                # Half, so that a request that is not answered leaves time for another one.
                async with asyncio.timeout(min(left, self._settings.renew_seconds / 2)):
                    await self._write(self._settings.identity)
            except TimeoutError:
                logger.warning("the Lease was not renewed: no answer")
            except ApiError as error:
                if error.code == 409:
                    await self._look_again(left)
                else:
                    logger.warning("the Lease was not renewed: %s", error)

    async def release(self) -> None:
        """Give the Lease back, so that another replica begins at once."""
        if not self.leads:
            return
        self._acts_until = 0.0
        settings = self._settings
        try:
            # Read anew: a renewal that was cut off may have been stored.
            self._lease = await self._client.get(LEASES, settings.operator_namespace, settings.lease_name)
            if _spec(self._lease).get("holderIdentity") == settings.identity:
                await self._write("", release=True)
                logger.info("the Lease was given back")
        except ApiError as error:
            logger.warning("the Lease was not given back, another replica has to wait: %s", error)

    async def _look_again(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                lease = await self._client.get(LEASES, self._settings.operator_namespace, self._settings.lease_name)
        except (TimeoutError, ApiError) as error:
            logger.warning("the Lease cannot be read: %s", error)
            return
        holder = _spec(lease).get("holderIdentity")
        if holder != self._settings.identity:
            self._acts_until = 0.0
            raise LeadershipLost(f"{holder or 'nobody'} holds the Lease")
        self._lease = lease

    async def _try_to_take(self) -> str | None:
        """Take the Lease if it is free or run out; returns its holder otherwise."""
        settings = self._settings
        try:
            self._lease = await self._client.get(LEASES, settings.operator_namespace, settings.lease_name)
        except ApiError as error:
            if error.code != 404:
                raise
            self._lease = None
        spec = _spec(self._lease)
        holder = str(spec.get("holderIdentity") or "")
        # Any change is a sign of life: what the other's clock says, and whether it goes at all, does not matter.
        seen = self._lease["metadata"]["resourceVersion"] if self._lease is not None else None
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        runs_out = self._seen_at + float(spec.get("leaseDurationSeconds") or settings.lease_seconds)
        if holder and holder != settings.identity and time.monotonic() < runs_out:
            return holder
        try:
            await self._write(settings.identity)
        except ApiError as error:
            if error.code == 409:
                return "another replica"
            raise
        return None

    async def _write(self, holder: str, release: bool = False) -> None:
        settings, began = self._settings, time.monotonic()
        body = _lease_of(self._lease, settings, holder, 1 if release else max(1, round(settings.lease_seconds)))
        path = LEASES.path(settings.operator_namespace)
        if self._lease is not None:
            path = LEASES.path(settings.operator_namespace, settings.lease_name)
        answer = await self._client.request(
            "PUT" if self._lease is not None else "POST", path, body=body, total_seconds=settings.renew_seconds
        )
        self._lease = cast("LeaseObject", answer)
        self._acts_until = 0.0 if release else began + settings.renew_seconds


def _spec(lease: LeaseObject | None) -> LeaseSpec:
    return {} if lease is None else lease.get("spec") or {}


def _lease_of(old: LeaseObject | None, settings: Settings, holder: str, seconds: int) -> Manifest:
    spec, now = _spec(old), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    same = spec.get("holderIdentity") == holder
    meta: Manifest = {"name": settings.lease_name, "namespace": settings.operator_namespace}
    if old is not None:
        meta = cast("Manifest", old["metadata"])
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {name: value for name, value in meta.items() if name != "managedFields"},
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": seconds,
            "acquireTime": spec.get("acquireTime", now) if same else now,
            "renewTime": now,
            "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (0 if same or not holder else 1),
        },
    }
