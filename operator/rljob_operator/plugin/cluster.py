"""The objects of a cluster, as the commands read and change them."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import cast

from prometheus_client import CollectorRegistry

from rljob_operator.kubernetes_objects import Item, Manifest, NodeObject, ObjectList, RLJobObject
from rljob_operator.plugin.problems import CommandError, from_api
from rljob_operator.shell.api.access import Access
from rljob_operator.shell.api.client import MERGE_PATCH, ApiClient, ApiError
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.shell.api.resources import RLJOBS, Resource

FIELD_MANAGER = "kubectl-rljob"
NODES: Resource[NodeObject] = Resource("", "v1", "nodes")
_TRY_SECONDS = 15.0
_PAGE = "500"


class Cluster:
    """One cluster and the namespace that is meant when none is named.

    Args:
        access: how it is reached.
        client: carries the requests.
    """

    def __init__(self, access: Access, client: ApiClient) -> None:
        self.access = access
        self.client = client
        self.namespace = access.namespace

    async def job(self, name: str) -> RLJobObject:
        """Read an RLJob; CommandError with the nearest names when there is none."""
        try:
            return await self.client.get(RLJOBS, self.namespace, name)
        except ApiError as error:
            doing = f"read RLJob {self.namespace}/{name}"
            if error.code != 404:
                raise from_api(error, doing) from None
            if f'"{name}" not found' not in str(error):
                text = "the CRD rljobs.rljob.dev is not installed (helm install rljob helm/rljob)"
                raise CommandError(f"this cluster has no RLJobs: {text}") from None
            near = await self._near(name)
            raise CommandError(f"there is no RLJob {name} in namespace {self.namespace}{near}") from None

    async def _near(self, name: str) -> str:
        try:
            jobs = await self.list(RLJOBS, None, "list RLJobs")
        except CommandError:
            jobs = []
        places = {(item["metadata"]["namespace"], item["metadata"]["name"]) for item in jobs}
        if elsewhere := sorted(place for place, found in places if found == name):
            return f"; it is in namespace {elsewhere[0]} (-n {elsewhere[0]})"
        here = sorted(found for place, found in places if place == self.namespace)
        if near := difflib.get_close_matches(name, here, n=1, cutoff=0.5):
            return f"; did you mean {near[0]}?"
        return f"; there are: {', '.join(here[:8])}" if here else "; there are none in it"

    async def list(
        self, resource: Resource[Item], namespace: str | None, doing: str, params: Mapping[str, str] | None = None
    ) -> list[Item]:
        """All objects of a kind in a namespace (None: in all), page by page."""
        items: list[Item] = []
        query = {"limit": _PAGE, **(params or {})}
        while True:
            try:
                answer = await self.client.request("GET", resource.path(namespace), params=query)
                listed = cast("ObjectList[Item]", answer)
            except ApiError as error:
                raise from_api(error, doing) from None
            items += listed.get("items") or []
            token = listed["metadata"].get("continue")
            if not token:
                return items
            query = {**query, "continue": token}

    async def find(self, resource: Resource[Item], name: str) -> Item | None:
        """Read an object; None when it is not there."""
        try:
            return await self.client.get(resource, self.namespace, name)
        except ApiError as error:
            if error.code == 404:
                return None
            raise from_api(error, f"read {resource} {self.namespace}/{name}") from None

    async def change(self, name: str, body: Manifest, doing: str) -> None:
        """Merge a change into an RLJob."""
        try:
            await self.client.request(
                "PATCH",
                RLJOBS.path(self.namespace, name),
                params={"fieldManager": FIELD_MANAGER},
                body=body,
                content_type=MERGE_PATCH,
            )
        except ApiError as error:
            raise from_api(error, doing) from None


@asynccontextmanager
async def open_cluster(access: Access) -> AsyncIterator[Cluster]:
    """A cluster whose connections end with the block."""
    client = ApiClient(access.configuration, OperatorMetrics(CollectorRegistry()), try_seconds=_TRY_SECONDS)
    try:
        yield Cluster(access, client)
    finally:
        await client.close()
