"""API server, user and namespace: found in the places of kubectl, read by the official client."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException, load_incluster_config
from kubernetes.aio.config.kube_config import KubeConfigLoader, KubeConfigMerger

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_EXEC_SECONDS = 60.0
_FRESH_SECONDS = 60.0
"""A file with a token may be replaced, and a program's token runs out: both are looked at again after so long."""


class AccessProblem(ValueError):
    """The API server's address or the credentials cannot be made out; the message says what to set."""


@dataclass(frozen=True, slots=True)
class Access:
    """An API server as the user (or the pod) reaches it."""

    configuration: Configuration
    """The official client's; its token is always the present one."""
    tls: ssl.SSLContext
    namespace: str = "default"
    """The one asked for, else the context's or the pod's, else `default`."""
    arguments: tuple[str, ...] = ()
    """Options with which kubectl reaches the same cluster as the same user."""


async def find_access(
    kubeconfig: str | None = None,
    context: str | None = None,
    namespace: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Access:
    """Use the named kubeconfig, else the files in KUBECONFIG, else ~/.kube/config, else the pod's service account.

    Raises:
        AccessProblem: none of them is there, or the one that is cannot be used.
    """
    # Not left to the library, which reads KUBECONFIG when it is imported.
    named = [kubeconfig] if kubeconfig else [part for part in environment.get("KUBECONFIG", "").split(":") if part]
    home = Path(environment.get("HOME", "~")).expanduser() / ".kube" / "config"
    present = [path for path in named or [str(home)] if Path(path).is_file()]
    if not present and not named and not context and environment.get("KUBERNETES_SERVICE_HOST"):
        return _in_pod(namespace)
    if not present:
        raise AccessProblem(f"{_absent(named)}; name a kubeconfig with --kubeconfig or KUBECONFIG")
    source = _Kubeconfig(present, context)
    configuration = await source.load()
    arguments = [*(["--kubeconfig", kubeconfig] if kubeconfig else []), *(["--context", context] if context else [])]
    return Access(configuration, _tls(configuration), namespace or source.namespace, tuple(arguments))


def _absent(named: Sequence[str]) -> str:
    """Say what lies at the places of a kubeconfig, none of which has a file."""
    folders = [path for path in named if Path(path).is_dir()]
    if folders:
        return f"{', '.join(folders)}: a folder, not a file"
    return f"there is no kubeconfig at {', '.join(named) or '~/.kube/config'}"


def _in_pod(namespace: str | None) -> Access:
    configuration = Configuration()
    try:
        load_incluster_config(configuration)
        own = (_SERVICE_ACCOUNT / "namespace").read_text(encoding="ascii").strip() if namespace is None else namespace
    except (ConfigException, OSError) as error:
        raise AccessProblem(
            f"this pod has no service account to reach the API server with ({error}); "
            "set automountServiceAccountToken: true"
        ) from None
    return Access(configuration, _tls(configuration), own)


def _tls(configuration: Configuration) -> ssl.SSLContext:
    try:
        context: ssl.SSLContext = RESTClientObject(configuration).ssl_context
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise AccessProblem(f"a certificate or key for {configuration.host} cannot be used: {error}") from None
    return context


class _Kubeconfig:
    """One context of some kubeconfigs.

    The official loader does the reading. Beside it: the first file's current-context counts, as in kubectl (the loader
    takes the last one's), a program's failure is an error (the loader logs it and goes on without credentials), and a
    token's file is read again (the loader reads it once, with its newline).
    """

    def __init__(self, files: list[str], context: str | None) -> None:
        self._files = ", ".join(files)
        try:
            merger = KubeConfigMerger(":".join(files))
            contents = list(merger.config_files.values())
            known = sorted(entry["name"] for content in contents for entry in content.get("contexts") or ())
            chosen = context or next(filter(None, (content.get("current-context") for content in contents)), "")
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise AccessProblem(f"{self._files} cannot be read: {error}") from None
        except (KeyError, TypeError, AttributeError):
            raise AccessProblem(f"{self._files} is no kubeconfig") from None
        if not known:
            raise AccessProblem(f"{self._files} has no contexts: is it a kubeconfig?")
        names = ", ".join(known)
        if not chosen:
            raise AccessProblem(f"{self._files} has no current-context; choose one with --context: {names}")
        if chosen not in known:
            raise AccessProblem(f"no context {chosen!r} in {self._files}; there are: {names}")
        self._context = chosen
        try:
            self._loader = KubeConfigLoader(merger.config, active_context=chosen, config_base_path=None)
            where = self._loader.current_context["context"]
            self.namespace = str(where.get("namespace") or "default")
            self._user_name = str(where.get("user"))
            self._user = _entry(contents, "user", self._user_name)
            self._cluster = _entry(contents, "cluster", str(where.get("cluster")))
        except (ConfigException, KeyError, TypeError, AttributeError) as error:
            raise self._problem(error) from None
        # The program is run here; the loader finds what it gave in its place.
        self._program: Mapping[str, Any] | None = self._user.pop("exec", None)
        self._program_until = 0.0
        self._fresh_until = 0.0

    async def load(self) -> Configuration:
        """Configuration of the official client; it asks for the token at each request, and gets the present one."""
        configuration = Configuration()
        # Each minute, not each request. Requests meanwhile use the token that is there.
        configuration.refresh_api_key_hook = self._refresh  # type: ignore[assignment]
        await self._refresh(configuration)
        return configuration

    async def _refresh(self, configuration: Configuration) -> None:
        if time.monotonic() < self._fresh_until:
            return
        self._fresh_until = time.monotonic() + _FRESH_SECONDS
        if self._program is not None and time.time() >= self._program_until:
            self._user |= await asyncio.to_thread(self._credentials, self._program)
        try:
            await self._loader.load_and_set(configuration)
        except (ConfigException, OSError, ValueError, TypeError, KeyError) as error:
            raise self._problem(error) from None
        if token := configuration.api_key.get("BearerToken"):
            configuration.api_key["BearerToken"] = token.strip()

    def _problem(self, error: object) -> AccessProblem:
        return AccessProblem(f"context {self._context!r} in {self._files}: {error}")

    def _credentials(self, program: Mapping[str, Any]) -> dict[str, str]:
        """Run a credential program as client.authentication.k8s.io says; it may ask the user on the terminal.

        The library's own has neither `provideClusterInfo`, `installHint`, the terminal nor a deadline.
        """
        known = {name: self._cluster.get(name) for name in ("server", "certificate-authority-data", "tls-server-name")}
        asked = {"cluster": {name: value for name, value in known.items() if value}}
        spec = {"interactive": True, **(asked if program.get("provideClusterInfo") else {})}
        try:
            info = {"apiVersion": program["apiVersion"], "kind": "ExecCredential", "spec": spec}
            variables = {entry["name"]: entry["value"] for entry in program.get("env") or ()}
            variables["KUBERNETES_EXEC_INFO"] = json.dumps(info)
            command = [program["command"], *(program.get("args") or ())]
            done = subprocess.run(
                command, env={**os.environ, **variables}, stdout=subprocess.PIPE, timeout=_EXEC_SECONDS, check=True
            )
            return self._given(json.loads(done.stdout)["status"])
        except FileNotFoundError:
            hint = program.get("installHint") or "install it"
            raise AccessProblem(f"user {self._user_name} needs the program {program['command']}: {hint}") from None
        except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
            raise AccessProblem(f"user {self._user_name}: {program['command']} gave no credentials: {error}") from None
        except KeyError as error:
            raise AccessProblem(f"user {self._user_name}: {error} is missing from its program or the answer") from None

    def _given(self, status: Mapping[str, Any]) -> dict[str, str]:
        ends = status.get("expirationTimestamp")
        until = datetime.fromisoformat(ends).astimezone(UTC).timestamp() if ends else float("inf")
        self._program_until = until - 2 * _FRESH_SECONDS
        if status.get("clientCertificateData"):
            names = (("client-certificate", "clientCertificateData"), ("client-key", "clientKeyData"))
            return {f"{name}-data": base64.b64encode(status[data].encode()).decode() for name, data in names}
        return {"token": str(status["token"])}


def _entry(contents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """A cluster or user by name, of the first file that has it; the object that the loader reads too."""
    for content in contents:
        for entry in content.get(f"{kind}s") or ():
            if entry["name"] == name:
                return entry[kind] or {}
    return {}
