"""A small synchronous client of the API server for tests, without caches; it repeats only requests not yet begun."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from network import Network

Object = dict[str, Any]
DEADLINE_SECONDS = 30.0
CACHE_SECONDS = 30.0
_POLL_SECONDS = 0.2
"""Eight scenarios ask side by side, and each answer costs the API server and the test some milliseconds."""
_BUILT_IN_PLURALS = {
    "NetworkPolicy": "networkpolicies",
    "PriorityClass": "priorityclasses",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
}


class ApiError(RuntimeError):
    """The API server refused; `message` is its own."""

    def __init__(self, code: int, reason: str, message: str, what: str) -> None:
        super().__init__(f"{what}: {code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message


class Kube:
    """Talks to one API server inside a network namespace; safe from any thread.

    Objects are found by `apiVersion/Kind` (`v1/Pod`, `ray.io/v1/RayCluster`), or by kind alone where it is in KINDS.
    """

    KINDS = {
        "Pod": "v1", "Secret": "v1", "Service": "v1", "Event": "v1", "Node": "v1", "Namespace": "v1",
        "ConfigMap": "v1", "ServiceAccount": "v1", "ResourceQuota": "v1", "RLJob": "rljob.dev/v1alpha1",
        "RayCluster": "ray.io/v1", "NetworkPolicy": "networking.k8s.io/v1", "Lease": "coordination.k8s.io/v1",
        "CustomResourceDefinition": "apiextensions.k8s.io/v1", "Stage": "kwok.x-k8s.io/v1alpha1",
        "ClusterRole": "rbac.authorization.k8s.io/v1", "ClusterRoleBinding": "rbac.authorization.k8s.io/v1",
        "Role": "rbac.authorization.k8s.io/v1", "RoleBinding": "rbac.authorization.k8s.io/v1",
        "ValidatingAdmissionPolicy": "admissionregistration.k8s.io/v1",
        "ValidatingAdmissionPolicyBinding": "admissionregistration.k8s.io/v1",
        "MutatingWebhookConfiguration": "admissionregistration.k8s.io/v1",
        "ValidatingWebhookConfiguration": "admissionregistration.k8s.io/v1",
    }  # fmt: skip
    CLUSTER_WIDE = {
        "Node", "Namespace", "CustomResourceDefinition", "Stage", "ClusterRole", "ClusterRoleBinding",
        "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "PriorityClass", "ClusterQueue",
        "ResourceFlavor", "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration",
    }  # fmt: skip

    def __init__(self, network: Network, host: str, port: int, tls: ssl.SSLContext | None, token: str) -> None:
        self._network = network
        self._address = (host, port)
        self._tls = tls
        self._token = token
        self._local = threading.local()

    def with_token(self, token: str) -> Kube:
        """Return a client that is somebody else."""
        return Kube(self._network, *self._address, self._tls, token)

    # --- requests ------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        **query: Any,
    ) -> Any:
        """Send one request and return the JSON answer (or text, where it is none). Raises ApiError.

        A server that still fills the cache of a new kind is asked again, as every client of Kubernetes does.
        """
        if query:
            path = f"{path}?{urlencode(query)}"
        sent = None if body is None else json.dumps(body)
        deadline = time.monotonic() + CACHE_SECONDS
        status, text = self._exchange(method, path, sent, content_type, accept)
        while status == 429 and "storage is (re)initializing" in text and time.monotonic() < deadline:
            time.sleep(0.1)
            status, text = self._exchange(method, path, sent, content_type, accept)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = text
        if status < 400:
            return answer
        what = f"{method} {path}"
        if isinstance(answer, dict):
            raise ApiError(status, answer.get("reason", ""), answer.get("message", ""), what)
        raise ApiError(status, "", str(answer), what)

    def _exchange(self, method: str, path: str, body: str | None, content_type: str, accept: str) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content_type, "Accept": accept}
        reused = getattr(self._local, "connection", None) is not None
        try:
            connection = self._connection()
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        except (http.client.HTTPException, OSError) as error:
            self._local.connection = None
            if not reused or isinstance(error, TimeoutError):
                raise
            return self._exchange(
                method, path, body, content_type, accept
            )  # a kept connection that the server had closed

    def _connection(self) -> http.client.HTTPConnection:
        if getattr(self._local, "connection", None) is None:
            self._local.connection = _Connection(self._network, *self._address, self._tls)
        connection: http.client.HTTPConnection = self._local.connection
        return connection

    def path(self, kind: str, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
        """Return the address of an object or a collection."""
        *version, kind = kind.split("/")
        api_version = "/".join(version) or self.KINDS[kind]
        root = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
        plural = _BUILT_IN_PLURALS.get(kind, f"{kind.lower()}s")
        parts = [root, *(["namespaces", namespace] if namespace else []), plural]
        return "/".join([*parts, *([name] if name else []), *([subresource] if subresource else [])])

    # --- objects -------------------------------------------------------------------------------

    def get(self, kind: str, namespace: str | None, name: str) -> Object:
        """Read one object. Raises ApiError with code 404."""
        found: Object = self.request("GET", self.path(kind, namespace, name))
        return found

    def find(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """Read one object, or None where there is none."""
        try:
            return self.get(kind, namespace, name)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def list(self, kind: str, namespace: str | None = None, labels: str = "") -> list[Object]:
        """Read a whole collection."""
        answer = self.request("GET", self.path(kind, namespace), **({"labelSelector": labels} if labels else {}))
        items: list[Object] = answer["items"]
        return items

    def table(self, kind: str, namespace: str) -> Object:
        """Read a collection as `kubectl get` shows it."""
        accept = "application/json;as=Table;v=v1;g=meta.k8s.io"
        table: Object = self.request("GET", self.path(kind, namespace), accept=accept)
        return table

    def create(self, manifest: Mapping[str, Any], **query: Any) -> Object:
        """Create an object."""
        made: Object = self.request("POST", self._path_of(manifest, named=False), manifest, **query)
        return made

    def apply(self, manifest: Mapping[str, Any], manager: str = "test", **query: Any) -> Object:
        """Apply on the server's side, with force."""
        applied: Object = self.request(
            "PATCH",
            self._path_of(manifest, named=True),
            manifest,
            "application/apply-patch+yaml",
            fieldManager=manager,
            force="true",
            **query,
        )
        return applied

    def patch(
        self, kind: str, namespace: str | None, name: str, change: Mapping[str, Any], subresource: str = ""
    ) -> Object:
        """Merge a change into an object (RFC 7386)."""
        path = self.path(kind, namespace, name, subresource)
        changed: Object = self.request("PATCH", path, change, "application/merge-patch+json")
        return changed

    def delete(self, kind: str, namespace: str | None, name: str, **options: Any) -> None:
        """Delete an object; it is no error when there is none."""
        try:
            self.request("DELETE", self.path(kind, namespace, name), options or None)
        except ApiError as error:
            if error.code != 404:
                raise

    def _path_of(self, manifest: Mapping[str, Any], named: bool) -> str:
        kind, metadata = manifest["kind"], manifest["metadata"]
        namespace = None if kind in self.CLUSTER_WIDE else metadata.get("namespace", "default")
        name = metadata["name"] if named else None
        return self.path(f"{manifest['apiVersion']}/{kind}", namespace, name)

    # --- waiting -------------------------------------------------------------------------------

    def wait_for(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        holds: Callable[[Object], Any],
        seconds: float = DEADLINE_SECONDS,
    ) -> Object:
        """Wait until something holds of an object. Raises AssertionError that shows the object as it was last."""
        seen: list[Object | None] = [None]

        def satisfied() -> bool:
            seen[0] = self.find(kind, namespace, name)
            return seen[0] is not None and bool(holds(seen[0]))

        if not wait_until(satisfied, seconds):
            shown = json.dumps(_without_noise(seen[0]), indent=1)[:6000] if seen[0] else "it is not there"
            raise AssertionError(f"{kind} {namespace}/{name} did not get there in {seconds:.0f} s: {shown}")
        assert seen[0] is not None
        return seen[0]

    def wait_gone(self, kind: str, namespace: str | None, name: str, seconds: float = DEADLINE_SECONDS) -> None:
        """Wait until an object is gone."""
        if not wait_until(lambda: self.find(kind, namespace, name) is None, seconds):
            raise AssertionError(f"{kind} {namespace}/{name} was still there after {seconds:.0f} s")

    def watch(self, kind: str, namespace: str | None, seconds: float) -> Iterator[Object]:
        """Yield the events of a collection for so long, beginning with what is there."""
        connection = _Connection(self._network, *self._address, self._tls)
        query = urlencode({"watch": "true", "timeoutSeconds": max(int(seconds), 1)})
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            connection.request("GET", f"{self.path(kind, namespace)}?{query}", headers=headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ApiError(response.status, "", response.read().decode(), f"watch {kind}")
            while line := response.readline():
                yield json.loads(line)
        finally:
            connection.close()


class _Connection(http.client.HTTPConnection):
    def __init__(self, network: Network, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(host, port, timeout=70)
        self._network = network
        self._tls = tls

    def connect(self) -> None:
        self.sock = self._network.connect(self.host, self.port, 70)
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)


def wait_until(holds: Callable[[], Any], seconds: float, every: float = _POLL_SECONDS) -> bool:
    """Ask again and again until it holds; False when it still does not after so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


def conditions(manifest: Object) -> dict[str, Object]:
    """Conditions of an object by type."""
    return {condition["type"]: condition for condition in manifest.get("status", {}).get("conditions") or []}


def _without_noise(manifest: Object) -> Object:
    metadata = {key: value for key, value in manifest.get("metadata", {}).items() if key != "managedFields"}
    return {**manifest, "metadata": metadata}
