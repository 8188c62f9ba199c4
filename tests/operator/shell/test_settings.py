"""Flags and variables: what is wrong is named."""

from __future__ import annotations

import pytest

from rljob_operator.settings import SettingsProblem, parse_settings


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
