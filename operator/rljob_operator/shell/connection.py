"""Where the API server is and who the operator is there: the pod's service account, or a kubeconfig."""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_SECONDS = 60.0


class ConnectionProblem(ValueError):
    """The API server's address or the credentials cannot be made out; the message says what to set."""


@dataclass(frozen=True, slots=True)
class Connection:
    """An API server and how to speak to it."""

    server: str
    tls: ssl.SSLContext | None
    token: Callable[[], str | None]
    """The bearer token as it is now: the kubelet replaces the file of a service account before it runs out."""


def connect(kubeconfig: str | None = None, context: str | None = None) -> Connection:
    """Use the kubeconfig that is named here or by KUBECONFIG, else the pod's service account, else ~/.kube/config.

    Raises:
        ConnectionProblem: none of them is there, or the one that is cannot be used.
    """
    named = kubeconfig or os.environ.get("KUBECONFIG")
    if named:
        return from_kubeconfig(Path(named), context)
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return in_cluster(SERVICE_ACCOUNT)
    home = Path.home() / ".kube" / "config"
    if home.exists():
        return from_kubeconfig(home, context)
    raise ConnectionProblem(
        "no API server: this is no pod (KUBERNETES_SERVICE_HOST is not set); name a kubeconfig with --kubeconfig"
    )


def in_cluster(folder: Path) -> Connection:
    """The pod's service account: CA and token lie in `folder`."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    except OSError as error:
        raise ConnectionProblem(
            f"the pod has no service account certificate at {folder / 'ca.crt'} ({error}); "
            "set automountServiceAccountToken: true"
        ) from None
    return Connection(f"https://{f'[{host}]' if ':' in host else host}:{port}", tls, token_file(folder / "token"))


def token_file(path: Path) -> Callable[[], str | None]:
    """A token that is read again every minute."""
    read_at, token = -_TOKEN_SECONDS, ""

    def current() -> str:
        nonlocal read_at, token
        if time.monotonic() - read_at >= _TOKEN_SECONDS:
            token, read_at = path.read_text(encoding="ascii").strip(), time.monotonic()
        return token

    return current


def from_kubeconfig(path: Path, context: str | None = None) -> Connection:
    """Read a kubeconfig: CA, client certificate or token; programs that fetch credentials are not run."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        chosen = _named(content, "contexts", context or content["current-context"])["context"]
        cluster = _named(content, "clusters", chosen["cluster"])["cluster"]
        user = _named(content, "users", chosen["user"]).get("user") or {}
        server = str(cluster["server"]).rstrip("/")
    except OSError as error:
        raise ConnectionProblem(f"the kubeconfig cannot be read: {error}") from None
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ConnectionProblem(f"kubeconfig {path}: {error} is missing or has the wrong form") from None
    if "exec" in user or "auth-provider" in user:
        raise ConnectionProblem(
            f"kubeconfig {path}: user {chosen['user']} gets its credentials from a program, which the operator does "
            "not run; use a token, a tokenFile or a client certificate"
        )
    return connection_of({**cluster, "server": server}, user, path.resolve().parent)


def connection_of(cluster: dict[str, Any], user: dict[str, Any], folder: Path) -> Connection:
    """From a `cluster` and a `user` of a kubeconfig; files that they name lie in `folder`.

    Raises:
        ConnectionProblem: a certificate or key cannot be used.
    """
    server = str(cluster["server"]).rstrip("/")
    try:
        tls = _tls(cluster, user, folder) if server.startswith("https") else None
    except (OSError, ValueError) as error:
        raise ConnectionProblem(f"a certificate or key of the kubeconfig cannot be used: {error}") from None
    return Connection(server, tls, _user_token(user, folder))


def _named(content: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    for entry in content[kind]:
        if entry["name"] == name:
            return dict(entry)
    raise KeyError(f"{kind}[name={name}]")


def _user_token(user: dict[str, Any], folder: Path) -> Callable[[], str | None]:
    if "tokenFile" in user:
        return token_file(folder / user["tokenFile"])
    token = user.get("token")
    return lambda: token


def _tls(cluster: dict[str, Any], user: dict[str, Any], folder: Path) -> ssl.SSLContext:
    authority = _pem(cluster, "certificate-authority", folder)
    tls = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    certificate, key = _pem(user, "client-certificate", folder), _pem(user, "client-key", folder)
    if certificate and key:
        # OpenSSL takes a client certificate from a file only.
        with tempfile.NamedTemporaryFile() as file:
            file.write(certificate.rstrip() + b"\n" + key)
            file.flush()
            tls.load_cert_chain(file.name)
    return tls


def _pem(entry: dict[str, Any], field: str, folder: Path) -> bytes | None:
    if f"{field}-data" in entry:
        return base64.b64decode(entry[f"{field}-data"])
    return (folder / entry[field]).read_bytes() if field in entry else None
