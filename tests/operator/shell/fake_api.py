"""A small API server in this process: lists in pages, watches, server-side apply, status, preconditions, and faults."""

from __future__ import annotations

import asyncio
import copy
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any

from aiohttp import web

TIME = "2026-01-01T00:00:00Z"
Object = dict[str, Any]
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_KINDS = {
    "v1": ("pods", "secrets", "events", "namespaces"),
    "rljob.dev/v1alpha1": ("rljobs",),
    "ray.io/v1": ("rayclusters",),
    "networking.k8s.io/v1": ("networkpolicies",),
    "coordination.k8s.io/v1": ("leases",),
    "extensions.agents.x-k8s.io/v1beta1": ("sandboxclaims",),
    "x.dev/v1": ("things",),
}


@dataclass
class Fault:
    """A fault that happens to the next `times` requests for which `hits` is true."""

    hits: Callable[[web.Request], bool]
    code: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "injected"
    delay: float = 0.0
    drop: bool = False
    times: int = 1


@dataclass
class Event:
    version: int
    plural: str
    kind: str
    item: Object
    before: Object | None


class FakeApi:
    """Objects by plural name, then by (namespace, name)."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[tuple[str, str], Object]] = {}
        self.applied: dict[tuple[str, str, str, str], Object] = {}
        self.history: list[Event] = []
        self.version = 10
        self.oldest = 0
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.deletions: list[tuple[str, str]] = []
        self.groups: dict[str, dict[str, list[str]]] = {}
        self.absent: set[str] = set()
        self.bookmark_seconds = 0.05
        self.silent = False
        self.rubbish = b""
        self.open_watches = 0
        self.end_watches = asyncio.Event()
        self.changed = asyncio.Condition()
        self.url = ""
        self.clock_ahead = 0.0
        """Seconds by which its clock is ahead of this machine's."""

    # --- used by tests ----------------------------------------------------------------------

    def fail(self, method: str, part: str, watch: bool | None = None, **fault: Any) -> Fault:
        """Let the next requests with this method whose path holds `part` fail."""

        def hits(request: web.Request) -> bool:
            matches = watch is None or watch == ("watch" in request.query)
            return request.method == method and part in request.path and matches

        self.faults.append(Fault(hits, **fault))
        return self.faults[-1]

    async def put(self, plural: str, item: Object, **changes: Any) -> Object:
        """Create or replace an object, as some client of its own."""
        meta = item["metadata"]
        key = (meta.get("namespace", "default"), meta["name"])
        old = self.objects.get(plural, {}).get(key)
        new = copy.deepcopy({**item, **changes})
        return await self._store(plural, key, new, old)

    async def patch_status(self, plural: str, name: str, status: Object, namespace: str = "default") -> Object:
        """Write a status, as another controller."""
        return await self.put(plural, self.objects[plural][namespace, name], status=status)

    async def remove(self, plural: str, name: str, namespace: str = "default") -> None:
        """Delete an object."""
        self.version += 1
        item = self.objects[plural].pop((namespace, name))
        gone = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
        await self._tell(Event(self.version, plural, "DELETED", gone, item))

    def compact(self) -> None:
        """Forget the history: watches from an older resourceVersion get 410."""
        self.oldest = self.version
        self.history.clear()

    def put_back(self, objects: dict[str, dict[tuple[str, str], Object]], version: int) -> None:
        """etcd from a backup: objects as they were, versions that go on from there, nothing of what came after."""
        self.objects, self.version, self.oldest = objects, version, 0
        self.history = []

    async def drop_watches(self) -> None:
        """End all open watches."""
        self.end_watches.set()
        async with self.changed:
            self.changed.notify_all()
        while self.open_watches:
            await asyncio.sleep(0.005)
        self.end_watches.clear()

    def count(self, method: str, part: str) -> int:
        """Requests so far."""
        return sum(1 for verb, path in self.requests if verb == method and part in path)

    # --- storage ----------------------------------------------------------------------------

    async def _store(self, plural: str, key: tuple[str, str], item: Object, old: Object | None) -> Object:
        meta = item["metadata"]
        self.version += 1
        meta.update(namespace=key[0], name=key[1], resourceVersion=str(self.version))
        meta.setdefault("uid", old["metadata"]["uid"] if old else str(uuid.uuid4()))
        meta.setdefault("creationTimestamp", TIME)
        meta["managedFields"] = [{"manager": "x" * 100}]
        changed = old is not None and old.get("spec") != item.get("spec")
        meta["generation"] = (old["metadata"]["generation"] + changed) if old else 1
        self.objects.setdefault(plural, {})[key] = item
        await self._tell(Event(self.version, plural, "MODIFIED" if old else "ADDED", item, old))
        return item

    async def _tell(self, event: Event) -> None:
        self.history.append(event)
        async with self.changed:
            self.changed.notify_all()

    # --- HTTP -------------------------------------------------------------------------------

    async def tell_time(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers["Date"] = formatdate(time.time() + self.clock_ahead, usegmt=True)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs))
        for fault in self.faults:
            if fault.times > 0 and fault.hits(request):
                fault.times -= 1
                await asyncio.sleep(fault.delay)
                if fault.drop:
                    assert request.transport is not None
                    request.transport.close()
                if fault.code:
                    return _status(fault.code, "Injected", fault.message, fault.headers)
                break
        parts = request.path.strip("/").split("/")
        if parts in (["api"], ["apis"], ["api", "v1"]) or (parts[0] == "apis" and len(parts) in (2, 3)):
            return self._discovery(parts)
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = rest[1] if rest[0] == "namespaces" else None
        plural, *name = rest[2:] if rest[0] == "namespaces" else rest
        if plural in self.absent:
            return _status(404, "NotFound", "the server could not find the requested resource")
        if not name:
            return await self._collection(request, plural, namespace)
        return await self._item(request, plural, (namespace or "", name[0]), name[1] if len(name) > 1 else None)

    def _discovery(self, parts: list[str]) -> web.Response:
        served: dict[str, dict[str, list[str]]] = {}
        for name, plurals in _KINDS.items():
            group, _, version = name.rpartition("/")
            served[group] = {version: [plural for plural in plurals if plural not in self.absent]}
        served |= self.groups
        if parts == ["api"]:
            return web.json_response({"versions": ["v1"]})
        if parts == ["apis"]:
            groups = [
                {
                    "name": group,
                    "versions": [{"version": version} for version in versions],
                    "preferredVersion": {"version": next(iter(versions))},
                }
                for group, versions in served.items()
                if group
            ]
            return web.json_response({"kind": "APIGroupList", "groups": groups})
        versions = served.get("" if parts[0] == "api" else parts[1])
        if versions is None:
            return _status(404, "NotFound", f"no group {parts[1]}")
        if parts[0] == "apis" and len(parts) == 2:
            return web.json_response({"versions": [{"version": version} for version in versions]})
        if parts[-1] not in versions:
            return _status(404, "NotFound", f"no version {parts[-1]}")
        resources = [
            {
                "name": name,
                "singularName": name[:-1],
                "kind": name[:-1].title(),
                "namespaced": name != "namespaces",
                "verbs": _VERBS,
            }
            for name in versions[parts[-1]]
        ]
        return web.json_response({"kind": "APIResourceList", "resources": resources})

    async def _collection(self, request: web.Request, plural: str, namespace: str | None) -> web.StreamResponse:
        if request.method == "POST":
            item = await request.json()
            key = (namespace or "", item["metadata"]["name"])
            if key in self.objects.get(plural, {}):
                return _status(409, "AlreadyExists", f"{plural} {key[1]} already exists")
            return web.json_response(await self._store(plural, key, item, None), status=201)
        if "watch" in request.query:
            return await self._watch(request, plural, namespace)
        found = sorted(self.objects.get(plural, {}).items())
        selector = request.query.get("labelSelector")
        items = [item for key, item in found if namespace in (None, key[0]) and _selected(item, selector)]
        start, listed = 0, self.version
        if token := request.query.get("continue"):
            start, listed = (int(part) for part in token.split("-"))
            if listed < self.oldest:
                return _status(410, "Expired", "the continue token is too old")
        end = start + int(request.query.get("limit") or len(items) or 1)
        meta = {"resourceVersion": str(listed), **({"continue": f"{end}-{listed}"} if end < len(items) else {})}
        return web.json_response({"kind": "List", "metadata": meta, "items": items[start:end]})

    async def _watch(self, request: web.Request, plural: str, namespace: str | None) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        if seen < self.oldest:
            return _status(410, "Expired", "too old resource version")
        response = web.StreamResponse()
        await response.prepare(request)
        self.open_watches += 1
        try:
            loop = asyncio.get_running_loop()
            until = loop.time() + float(request.query["timeoutSeconds"])
            while loop.time() < until and not self.end_watches.is_set():
                if seen < self.oldest:
                    error = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                    await _line(response, {"type": "ERROR", "object": error})
                    break
                reached = self.version
                for event in [event for event in self.history if event.version > seen]:
                    shown = _shown(event, plural, namespace, request.query.get("labelSelector"))
                    if shown and not self.silent:
                        await _line(response, shown)
                if self.rubbish:
                    rubbish, self.rubbish = self.rubbish, b""
                    await response.write(rubbish)
                # A watch from a version that the server has not reached is silent until then, as the real one's.
                seen = max(seen, reached)
                if not self.silent and seen <= self.version:
                    bookmark = {"metadata": {"resourceVersion": str(seen)}}
                    await _line(response, {"type": "BOOKMARK", "object": bookmark})
                await self._news(seen)
        except ConnectionError:
            pass
        finally:
            self.open_watches -= 1
        return response

    async def _news(self, seen: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.bookmark_seconds), self.changed:
                await self.changed.wait_for(lambda: self.version > seen or self.end_watches.is_set())

    async def _item(
        self, request: web.Request, plural: str, key: tuple[str, str], subresource: str | None
    ) -> web.Response:
        old = self.objects.get(plural, {}).get(key)
        if request.method == "PATCH" and "apply" in request.content_type:
            return await self._apply(request, plural, key, subresource, old)
        if old is None:
            return _status(404, "NotFound", f"{plural} {key[1]} not found")
        if request.method == "GET":
            return web.json_response(old)
        body = await request.json()
        if request.method == "DELETE":
            self.deletions.append((plural, body["propagationPolicy"]))
            wanted = body.get("preconditions", {}).get("uid")
            if wanted and wanted != old["metadata"]["uid"]:
                return _status(409, "Conflict", "the UID in the precondition does not match")
            await self.remove(plural, key[1], key[0])
            return web.json_response({"kind": "Status", "status": "Success"})
        if request.method == "PUT":
            if body["metadata"].get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
                return _status(409, "Conflict", "the object has been modified")
            return web.json_response(await self._store(plural, key, body, old))
        if "json-patch" in request.content_type:
            try:
                body = _patched(old, body)
            except ValueError as error:
                return _status(422, "Invalid", str(error))
            return web.json_response(await self._store(plural, key, body, old))
        return web.json_response(await self._store(plural, key, _merged(old, body), old))

    async def _apply(
        self, request: web.Request, plural: str, key: tuple[str, str], subresource: str | None, old: Object | None
    ) -> web.Response:
        body = await request.json()
        wanted = body["metadata"].get("resourceVersion")
        if old is None and subresource:
            return _status(404, "NotFound", f"{plural} {key[1]} not found")
        if wanted and (old is None or wanted != old["metadata"]["resourceVersion"]):
            return _status(409, "Conflict", "the object has been modified")
        uid = body["metadata"].get("uid")
        if uid and (old is None or uid != old["metadata"]["uid"]):
            return _status(409, "Conflict", "Precondition failed: UID in precondition")
        if subresource == "status":
            fields = {"status": body.get("status")}
        else:
            kept = ("labels", "annotations", "ownerReferences")
            meta = {name: value for name, value in body["metadata"].items() if name in kept}
            fields = {name: value for name, value in body.items() if name not in ("status", "metadata")}
            fields["metadata"] = meta
        place = (plural, *key, f"{request.query['fieldManager']}/{subresource}")
        base = _without(copy.deepcopy(old or {"metadata": {}}), self.applied.get(place, {}), fields)
        self.applied[place] = copy.deepcopy(fields)
        new = _merged(base, fields)
        if old is not None and _same(new, old):
            return web.json_response(old)
        return web.json_response(await self._store(plural, key, new, old), status=200 if old else 201)


@asynccontextmanager
async def serving(api: FakeApi) -> AsyncIterator[FakeApi]:
    """Serve on a free port of this machine."""
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", api.handle)
    app.on_response_prepare.append(api.tell_time)
    runner = web.AppRunner(app, shutdown_timeout=0.2, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        api.end_watches.set()
        await runner.cleanup()


def _status(code: int, reason: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code, headers=headers)


async def _line(response: web.StreamResponse, event: Object) -> None:
    await response.write(json.dumps(event).encode() + b"\n")


def _shown(event: Event, plural: str, namespace: str | None, selector: str | None) -> Object | None:
    """The event as a watch with this selector shows it: what leaves the selection is DELETED there."""
    if event.plural != plural or namespace not in (None, event.item["metadata"]["namespace"]):
        return None
    now = event.kind != "DELETED" and _selected(event.item, selector)
    before = event.before is not None and _selected(event.before, selector)
    if not now and not before:
        return None
    kind = "DELETED" if not now else "MODIFIED" if before else "ADDED"
    return {"type": kind, "object": event.item}


def _selected(item: Object, selector: str | None) -> bool:
    labels = item["metadata"].get("labels") or {}
    for part in (selector or "").split(",") if selector else ():
        key, equals, value = part.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True


def _without(item: Any, before: Any, now: Any) -> Any:
    """Drop what a manager applied before and does not apply now."""
    if isinstance(item, dict) and isinstance(before, dict):
        for name, value in before.items():
            if name not in item:
                continue
            if not isinstance(now, dict) or name not in now:
                del item[name]
            else:
                item[name] = _without(item[name], value, now[name])
    return item


def _patched(old: Object, operations: list[dict[str, Any]]) -> Object:
    """The object with a JSON patch (RFC 6902) of tests, additions and replacements of fields."""
    new = copy.deepcopy(old)
    for operation in operations:
        *way, last = operation["path"].split("/")[1:]
        block: Any = new
        for name in way:
            block = block[int(name)] if isinstance(block, list) else block[name]
        if operation["op"] != "test":
            block[last] = operation["value"]
        elif block[last] != operation["value"]:
            raise ValueError(f"the test of {operation['path']} failed")
    return new


def _merged(base: Any, patch: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(patch, dict):
        return copy.deepcopy(patch)
    return {**base, **{name: _merged(base.get(name), value) for name, value in patch.items()}}


def _same(new: Object, old: Object) -> bool:
    def bare(item: Object) -> Object:
        meta = {k: v for k, v in item["metadata"].items() if k not in ("resourceVersion", "managedFields")}
        return {**item, "metadata": meta}

    return bare(new) == bare(old)
