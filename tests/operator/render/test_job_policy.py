"""The administrator's policy: what a manifest may name, by the operator's own check."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from render_cases import PUBLISHED, SETTINGS, base, view
from support.job_policy_cases import ALLOWED, GRANTS, REFUSED

from rljob_api.profiles import PROFILES
from rljob_operator.render import JobPolicy, RenderSettings, check_renderable
from rljob_operator.render.job_policy import is_below
from rljob_operator.settings import SettingsProblem, parse_settings


def under(policy: dict[str, Any]) -> RenderSettings:
    return replace(SETTINGS, policy=JobPolicy.model_validate(policy))


@pytest.mark.parametrize(("setting", "field", "rule"), REFUSED, ids=[case[0][:70] for case in REFUSED])
def test_what_the_default_policy_refuses_is_named_with_its_rule(setting: str, field: str, rule: str) -> None:
    job = base(setting)
    said = check_renderable(job, under({}))
    assert said.startswith(f"{field}: "), said
    assert f"policy.{rule} of the chart" in said
    assert check_renderable(job, under(GRANTS[rule])) == "" or rule not in check_renderable(job, under(GRANTS[rule]))
    assert check_renderable(job, under({"trustedNamespaces": ["team"]})) == ""
    assert check_renderable(job, SETTINGS) == ""


@pytest.mark.parametrize("setting", ALLOWED)
def test_what_the_default_policy_allows(setting: str) -> None:
    assert check_renderable(base(setting), under({})) == ""


@pytest.mark.parametrize("profile", PROFILES)
def test_the_mounts_of_profiles_are_allowed(profile: str) -> None:
    assert check_renderable(base(f"resources.profile={profile}"), under({})) == ""
    paths = [m.source or m.path for m in PROFILES[profile].host_mounts]
    assert (
        check_renderable(base(f"resources={{profile: ascend-a2, overrides: {{hostMounts: {paths}}}}}"), under({})) == ""
    )


@pytest.mark.parametrize("path", PUBLISHED.values(), ids=PUBLISHED)
def test_published_set_ups_need_nothing_but_what_their_pages_say(path: Any) -> None:
    job = view(path)
    grants = {"podFields": ["hostNetwork"]} if job.spec is not None and job.spec.network.host_network else {}
    assert check_renderable(job, under(grants)) == ""


@pytest.mark.parametrize(
    ("allowed", "asked", "fine"),
    [
        ("/data", "/data", True),
        ("/data", "/data/a/b", True),
        ("/data/", "/data/a", True),
        ("/data", "/database", False),
        ("/data", "/", False),
        ("/", "/etc", True),
    ],
)
def test_folders_are_whole_folders(allowed: str, asked: str, fine: bool) -> None:
    job = base(f"pods.worker={{spec: {{volumes: [{{name: more, hostPath: {{path: {asked}}}}}]}}}}")
    said = check_renderable(job, under({"hostPaths": [allowed]}))
    assert (said == "") is fine, said


@pytest.mark.parametrize("path", ["/data/../etc", "/data/a/../../etc", "/data/..", "/data/a/.."])
def test_no_path_leaves_a_folder_by_its_parent(path: str) -> None:
    assert not is_below(["/data"], path)


@pytest.mark.parametrize(
    ("pattern", "image", "fine"),
    [
        ("registry.example/*", "registry.example/a/b:1", True),
        ("registry.example/*", "registryxexample/a", False),
        ("registry.example/*", "evil/registry.example/a", False),
        ("registry.example/worker:1", "registry.example/worker:12", False),
    ],
)
def test_patterns_stand_for_whole_names(pattern: str, image: str, fine: bool) -> None:
    assert (check_renderable(base(f"image={image}"), under({"images": [pattern]})) == "") is fine
    assert check_renderable(base(), under({"images": []})) == "", "the operator's own image needs no rule"


def test_a_job_without_token_authentication_is_refused_where_ray_knows_none() -> None:
    old = replace(under({}), ray_version="2.51.0")
    assert check_renderable(base(), old).startswith("spec.network.rayAuthentication: ")
    assert check_renderable(base(), replace(under({"openRay": True}), ray_version="2.51.0")) == ""


def test_the_operators_default_is_the_restrictive_one_and_a_wrong_value_is_named() -> None:
    assert parse_settings([], {}).render.policy == JobPolicy()
    given = parse_settings([], {"RLJOB_POLICY": '{"secrets": ["hub"]}'}).render.policy
    assert given is not None
    assert given.secrets == ["hub"]
    with pytest.raises(SettingsProblem, match=r"--policy: podFields\.0: Input should be"):
        parse_settings([], {"RLJOB_POLICY": '{"podFields": ["containers"]}'})
    with pytest.raises(SettingsProblem, match="--policy: secret: Extra inputs"):
        parse_settings([], {"RLJOB_POLICY": '{"secret": []}'})
