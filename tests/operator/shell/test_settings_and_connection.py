"""Flags, variables, kubeconfigs: what is wrong is named."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_operator.settings import SettingsProblem, parse_settings
from rljob_operator.shell import connection
from rljob_operator.shell.connection import ConnectionProblem, connect, from_kubeconfig, in_cluster


def test_flags_come_before_variables_and_these_before_defaults() -> None:
    environment = {
        "RLJOB_CONCURRENCY": "3",
        "RLJOB_LEASE_NAME": "variable",
        "RLJOB_NAMESPACES": "a, b",
        "RLJOB_KUBERAY_VERSION": "v1.6.2",
        "RLJOB_WORKER_IMAGES": "cpu=x:1,ascend-a2=y:2",
        "RLJOB_WORKER_IMAGE": "",
        "RLJOB_OPERATOR_NAMESPACE": "here",
    }
    settings = parse_settings(["--lease-name", "flag"], environment)
    assert (settings.concurrency, settings.lease_name, settings.namespaces) == (3, "flag", ("a", "b"))
    assert settings.render.kuberay_version == (1, 6, 2)
    assert settings.render.worker_images == {"cpu": "x:1", "ascend-a2": "y:2"}
    assert settings.render.operator_namespace == settings.operator_namespace == "here"
    assert parse_settings([], {}).namespaces == ()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--lease-seconds", "5", "--renew-seconds", "10"], "--lease-seconds 5"),
        (["--concurrency", "0"], "--concurrency 0 must be above 0"),
        (["--kuberay-version", "newest"], "--kuberay-version: 'newest' is no version"),
        (["--worker-images", "cpu"], "--worker-images: 'cpu' is no pair"),
        (["--ray-address", "http://{host}"], "--ray-address"),
    ],
)
def test_a_bad_value_is_refused_with_the_flags_name(arguments: list[str], names: str) -> None:
    with pytest.raises(SettingsProblem, match=names):
        parse_settings(arguments, {})


def kubeconfig(folder: Path, user: dict[str, Any], **cluster: Any) -> Path:
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:1/", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path = folder / "config"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_kubeconfig_with_a_token_or_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = from_kubeconfig(kubeconfig(tmp_path, {"token": "abc"}))
    assert (found.server, found.tls, found.token()) == ("http://127.0.0.1:1", None, "abc")
    (tmp_path / "token").write_text("first\n")
    found = from_kubeconfig(kubeconfig(tmp_path, {"tokenFile": "token"}))
    assert found.token() == "first"
    (tmp_path / "token").write_text("second\n")
    assert found.token() == "first"
    monkeypatch.setattr(connection, "_TOKEN_SECONDS", 0.0)
    assert found.token() == "second"


def test_what_a_kubeconfig_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConnectionProblem, match="program"):
        from_kubeconfig(kubeconfig(tmp_path, {"exec": {"command": "x"}}))
    with pytest.raises(ConnectionProblem, match=r"contexts\[name=other\]"):
        from_kubeconfig(kubeconfig(tmp_path, {}), "other")
    with pytest.raises(ConnectionProblem, match="cannot be read"):
        connect(str(tmp_path / "none"))
    bad = base64.b64encode(b"no certificate").decode()
    with pytest.raises(ConnectionProblem, match="certificate"):
        from_kubeconfig(
            kubeconfig(tmp_path, {}, **{"server": "https://127.0.0.1:1", "certificate-authority-data": bad})
        )


def test_a_pod_without_a_service_account_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ConnectionProblem, match="automountServiceAccountToken"):
        in_cluster(tmp_path)
