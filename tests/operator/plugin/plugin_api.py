"""An API server that keeps objects in a dictionary, with a driver and a Ray head behind its pod proxy."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

API_TOKEN = "api-token"
RAY_TOKEN = "ray-token"
PLURALS = {"RLJob": "rljobs", "RayCluster": "rayclusters", "Pod": "pods", "Secret": "secrets", "Event": "events"}
_PROXY = re.compile(r"/api/v1/namespaces/([^/]+)/pods/([^/:]+):(\d+)/proxy(/.*)")
_LIST = re.compile(r"/(?:api|apis/[^/]+)/[^/]+(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)")
_LOG = re.compile(r"/api/v1/namespaces/([^/]+)/pods/([^/]+)/log")
_ONE = re.compile(r"/(?:api|apis/[^/]+)/[^/]+/namespaces/(?P<namespace>[^/]+)/(?P<plural>[^/]+)/(?P<name>[^/]+)")

Answer = tuple[int, Any]


class FakeApi:
    """The API server that the commands talk to.

    The refusals are worded as the real API server words them.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        """By plural, namespace and name."""
        self.forbidden: set[tuple[str, str]] = set()
        """Verb and plural."""
        self.groups: dict[str, str] = {}
        """Version by group, beside those of RLJob and Ray."""
        self.has_crd = True
        self.patches: list[tuple[str, Any, str]] = []
        self.ports: dict[int, int | Callable[[str, dict[str, str]], Answer | list[bytes]]] = {}
        """Behind the pods' proxy: a port of this machine, or a function of path and headers."""
        self.seen: list[str] = []
        self.logs: dict[tuple[str, str], str] = {}
        """Output by pod and container; `container~` has that of the run before."""
        self.page = 500
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        self._server = server
        self.address = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, plural: str, item: dict[str, Any]) -> dict[str, Any]:
        meta = item["metadata"]
        self.objects[plural, meta.get("namespace", ""), meta["name"]] = item
        return item

    def kubeconfig(self, path: Path, **user: Any) -> Path:
        content = {
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "rl"}}],
            "clusters": [{"name": "c", "cluster": {"server": self.address}}],
            "users": [{"name": "u", "user": user or {"token": API_TOKEN}}],
        }
        path.write_text(json.dumps(content))
        return path

    # --- requests ----------------------------------------------------------------------------

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer | list[bytes]:
        if headers.pop("authorization", "") != f"Bearer {API_TOKEN}":
            return _status(401, "Unauthorized", "Unauthorized")
        url = urlsplit(target)
        if proxied := _PROXY.fullmatch(url.path):
            return self._proxied(method, proxied, url.query, headers)
        if group := re.fullmatch(r"/apis/([^/]+)", url.path):
            version = self.groups.get(group[1])
            return (200, {"preferredVersion": {"version": version}}) if version else (404, "404 page not found\n")
        if "/rljobs" in url.path and not self.has_crd:
            return 404, "404 page not found\n"
        if found := _LOG.fullmatch(url.path):
            asked = parse_qs(url.query)
            container = asked["container"][0] + ("~" if asked["previous"] == ["true"] else "")
            return self._refused("get", "pods/log", found[1]) or (200, self.logs[found[2], container])
        if found := _ONE.fullmatch(url.path):
            return self._one(method, found, headers, body)
        if found := _LIST.fullmatch(url.path):
            return self._all(found, {name: values[0] for name, values in parse_qs(url.query).items()})
        return 404, "404 page not found\n"

    def _one(self, method: str, found: re.Match[str], headers: dict[str, str], body: bytes) -> Answer:
        namespace, plural, name = found["namespace"], found["plural"], found["name"]
        if refused := self._refused("get" if method == "GET" else method.lower(), plural, namespace):
            return refused
        item = self.objects.get((plural, namespace, name))
        if item is None:
            return _status(404, "NotFound", f'{plural}{_group(plural)} "{name}" not found')
        if method == "PATCH":
            self.patches.append((name, json.loads(body), headers["content-type"]))
            _merge(item, json.loads(body))
        return 200, item

    def _all(self, found: re.Match[str], query: dict[str, str]) -> Answer:
        namespace, plural = found["namespace"], found["plural"]
        if refused := self._refused("list", plural, namespace or ""):
            return refused
        items = [
            item
            for (kind, place, _), item in sorted(self.objects.items())
            if kind == plural and namespace in (None, place) and _selected(item, query)
        ]
        start, limit = int(query.get("continue", 0)), min(int(query.get("limit", 500)), self.page)
        more = {"continue": str(start + limit)} if start + limit < len(items) else {}
        return 200, {"items": items[start : start + limit], "metadata": more}

    def _refused(self, verb: str, plural: str, namespace: str) -> Answer | None:
        if (verb, plural) not in self.forbidden:
            return None
        where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        text = f'User "ada" cannot {verb} resource "{plural}" in API group "{_group(plural).lstrip(".")}" {where}'
        return _status(403, "Forbidden", f"{plural}{_group(plural)} is forbidden: {text}")

    def _proxied(self, method: str, found: re.Match[str], query: str, headers: dict[str, str]) -> Answer | list[bytes]:
        namespace, pod, port, path = found[1], found[2], int(found[3]), found[4]
        if refused := self._refused("get", "pods/proxy", namespace):
            return refused
        behind = self.ports.get(port)
        if ("pods", namespace, pod) not in self.objects or behind is None:
            message = f"error trying to reach service: dial tcp 10.244.1.7:{port}: connect: connection refused"
            return _status(503, "ServiceUnavailable", message)
        target = path + (f"?{query}" if query else "")
        if not isinstance(behind, int):
            return behind(target, headers)
        connection = http.client.HTTPConnection("127.0.0.1", behind, timeout=60)
        passed = {name: value for name, value in headers.items() if name not in ("host", "connection")}
        connection.request(method, target, headers=passed)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


class FakeRay:
    """Ray's job and log API for one submission, with token authentication."""

    def __init__(self, submission: str, text: str, status: str = "RUNNING") -> None:
        self.submission = submission
        self.text = text
        self.status = status
        self.seen: list[str] = []

    def __call__(self, target: str, headers: dict[str, str]) -> Answer | list[bytes]:
        self.seen.append(target)
        if target == "/api/version":
            return 200, {"version": "4", "session_name": "session_1"}
        if headers.get("x-ray-authorization") != f"Bearer {RAY_TOKEN}":
            return 401, "Unauthorized: Missing authentication token"
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path == f"/api/jobs/{self.submission}":
            return 200, {"status": self.status, "message": "", "driver_exit_code": None, "driver_node_id": "ab"}
        if url.path.startswith("/api/v0/logs/"):
            if (query.get("node_id"), query.get("filename")) != ("ab", f"job-driver-{self.submission}.log"):
                return 500, "Server got itself in trouble"
            lines = self.text.splitlines(keepends=True)
            tail = int(query["lines"])
            text = "".join(lines if tail < 0 else lines[-tail:])
            if url.path.endswith("/stream"):
                half = len(text) // 2
                self.status = "SUCCEEDED"
                return [text[:half].encode(), text[half:].encode(), b""]
            return 200, text
        return 404, f"Job {url.path} does not exist"


def _handler(api: FakeApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            api.seen.append(f"{self.command} {self.path}")
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer = api.answer(self.command, self.path, headers, body)
            if isinstance(answer, list):
                self._stream(answer)
                return
            status, content = answer
            raw = content if isinstance(content, bytes) else _text(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_PATCH = do_POST = do_GET

        def _stream(self, parts: list[bytes]) -> None:
            """Go on until the reader leaves, as Ray does when a log is followed."""
            self.close_connection = True
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for part in filter(None, parts):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                    self.wfile.flush()
                    time.sleep(0.05)
                self.connection.settimeout(20)
                self.connection.recv(1)
            except OSError:
                pass

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def _status(code: int, reason: str, message: str) -> Answer:
    return code, {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def _group(plural: str) -> str:
    return {"rljobs": ".rljob.dev", "rayclusters": ".ray.io"}.get(plural, "")


def _selected(item: dict[str, Any], query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    wanted = dict(pair.split("=") for pair in filter(None, query.get("labelSelector", "").split(",")))
    fields = dict(pair.split("=") for pair in filter(None, query.get("fieldSelector", "").split(",")))
    return all(labels.get(k) == v for k, v in wanted.items()) and all(item.get(k) == v for k, v in fields.items())


def _merge(item: dict[str, Any], change: dict[str, Any]) -> None:
    for name, value in change.items():
        if isinstance(value, dict):
            _merge(item.setdefault(name, {}), value)
        else:
            item[name] = value
