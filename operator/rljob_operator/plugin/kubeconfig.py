"""Which cluster, which user, which namespace: as kubectl finds them out."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rljob_operator.plugin.problems import CommandError
from rljob_operator.shell.connection import SERVICE_ACCOUNT, Connection, ConnectionProblem, connection_of, in_cluster

_EXEC_SECONDS = 60.0
_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


@dataclass(frozen=True, slots=True)
class Access:
    """A cluster as the user reaches it."""

    connection: Connection
    namespace: str
    """`--namespace`, else the context's, else `default`."""
    arguments: tuple[str, ...]
    """What kubectl needs to reach the same cluster as the same user."""


def access(
    kubeconfig: str | None, context: str | None, namespace: str | None, environment: Mapping[str, str] = os.environ
) -> Access:
    """Find the cluster: `--kubeconfig`, else the files in KUBECONFIG, else ~/.kube/config, else the pod's own.

    Raises:
        CommandError: no such file or context, or the credentials cannot be had.
    """
    named = (
        [kubeconfig] if kubeconfig else [part for part in environment.get("KUBECONFIG", "").split(os.pathsep) if part]
    )
    files = [Path(name) for name in named] or [Path(environment.get("HOME", "~")).expanduser() / ".kube" / "config"]
    present = [path for path in files if path.is_file()]
    if not present:
        return _without_file(kubeconfig, named, context, namespace, environment)
    content = _merged(present)
    chosen = context or content["current-context"]
    if not chosen:
        raise CommandError(f"{present[0]} has no current-context; choose one with --context: {_names(content)}")
    where = content["contexts"].get(chosen)
    if where is None:
        raise CommandError(f"no context {chosen!r} in {_list(present)}; there are: {_names(content)}")
    try:
        cluster, user = content["clusters"][where["cluster"]], dict(content["users"].get(where.get("user"), {}))
        if "exec" in user:
            user |= _credentials(user["exec"], cluster, str(where["user"]))
        connection = connection_of(cluster, user, Path("/"))
    except KeyError as error:
        raise CommandError(f"context {chosen!r} in {_list(present)}: {error} is missing") from None
    except (ConnectionProblem, OSError, ValueError) as error:
        raise CommandError(f"context {chosen!r} in {_list(present)}: {error}") from None
    arguments = [*(["--kubeconfig", kubeconfig] if kubeconfig else []), *(["--context", context] if context else [])]
    return Access(connection, namespace or where.get("namespace") or "default", tuple(arguments))


def _without_file(
    kubeconfig: str | None, named: list[str], context: str | None, namespace: str | None, environment: Mapping[str, str]
) -> Access:
    if kubeconfig or named or context or not environment.get("KUBERNETES_SERVICE_HOST"):
        looked = ", ".join(named) or "~/.kube/config"
        raise CommandError(f"there is no kubeconfig at {looked}; name one with --kubeconfig or KUBECONFIG")
    try:
        own = (SERVICE_ACCOUNT / "namespace").read_text(encoding="ascii").strip()
        return Access(in_cluster(SERVICE_ACCOUNT), namespace or own, ())
    except (ConnectionProblem, OSError) as error:
        raise CommandError(f"this pod has no way to the API server: {error}") from None


def _merged(files: list[Path]) -> dict[str, Any]:
    """Entries by name; the first file that has one wins, as in kubectl."""
    merged: dict[str, Any] = {"contexts": {}, "clusters": {}, "users": {}, "current-context": ""}
    for path in files:
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            for kind, field in (("contexts", "context"), ("clusters", "cluster"), ("users", "user")):
                for entry in content.get(kind) or ():
                    merged[kind].setdefault(entry["name"], _absolute(entry.get(field) or {}, path.resolve().parent))
            merged["current-context"] = merged["current-context"] or content.get("current-context") or ""
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise CommandError(f"{path} cannot be read: {error}") from None
        except (KeyError, TypeError, AttributeError):
            raise CommandError(f"{path} is no kubeconfig") from None
    return merged


def _absolute(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {name: str(folder / value) if name in _FILES else value for name, value in entry.items()}


def _credentials(program: Mapping[str, Any], cluster: Mapping[str, Any], user: str) -> dict[str, Any]:
    """Run a credential program as client.authentication.k8s.io says; it may ask the user on the terminal."""
    info = {"apiVersion": program["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": True}}
    if program.get("provideClusterInfo"):
        known = {"server": cluster["server"], "certificate-authority-data": cluster.get("certificate-authority-data")}
        info["spec"] = {"interactive": True, "cluster": {name: value for name, value in known.items() if value}}
    variables = {entry["name"]: entry["value"] for entry in program.get("env") or ()}
    variables["KUBERNETES_EXEC_INFO"] = json.dumps(info)
    command = [program["command"], *(program.get("args") or ())]
    try:
        done = subprocess.run(
            command, env={**os.environ, **variables}, stdout=subprocess.PIPE, timeout=_EXEC_SECONDS, check=True
        )
        status = json.loads(done.stdout)["status"]
    except FileNotFoundError:
        hint = program.get("installHint") or "install it"
        raise CommandError(f"user {user} needs the program {command[0]}: {hint}") from None
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"user {user}: {command[0]} gave no credentials: {error}") from None
    found = {"token": status.get("token")}
    if status.get("clientCertificateData"):
        for name, value in (("client-certificate", "clientCertificateData"), ("client-key", "clientKeyData")):
            found[f"{name}-data"] = _base64(status[value])
    return {name: value for name, value in found.items() if value}


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _names(content: Mapping[str, Any]) -> str:
    return ", ".join(sorted(content["contexts"])) or "none"


def _list(files: list[Path]) -> str:
    return ", ".join(str(path) for path in files)
