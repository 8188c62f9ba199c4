"""Sandboxes of a warm pool: claimed, bound, ended, made anew and released, by a whole operator."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_api import TIME
from operator_cases import SETTINGS, Case, a_case, hurried, make_ready, manifest, until

from rljob_api.validation import load_manifest
from rljob_operator.shell.jobs.controller import Controller
from rljob_operator.state.reconcile import reconcile

ALLOWED = replace(SETTINGS.render, sandbox_claims=True)
NAMES = ["a-sandbox-0", "a-sandbox-1"]
POOL: dict[str, Any] = {
    "reward": {"name": "code", "args": {"kind": "Calls", "tests": "tests"}},
    "sandbox": {"isolation": "Service", "service": {"warmPool": {"name": "pool", "count": 2}}},
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of seconds take a moment."""
    monkeypatch.setattr("rljob_operator.state.reconcile.STARTING_LOOK_SECONDS", 0.05)


def play(test: Callable[[Case, Controller], Awaitable[None]]) -> None:
    async def run() -> None:
        async with a_case() as case, case.operator(reconcile, render=ALLOWED, status_seconds=0.05) as controller:
            await test(case, controller)

    asyncio.run(run())


def claims(case: Case) -> dict[str, dict[str, Any]]:
    found = case.api.objects.get("sandboxclaims", {})
    return {name: item for (_, name), item in sorted(found.items())}


async def begin(case: Case, **spec: Any) -> None:
    """A job whose pods are ready."""
    await case.api.put("rljobs", manifest(**{**POOL, **spec}))
    await until(lambda: ("default", "a") in case.api.objects.get("rayclusters", {}), case.status)
    assert not claims(case), "the job has no devices yet"
    await make_ready(case.api)


async def say(case: Case, name: str, reason: str, message: str = "", address: str = "") -> None:
    """Play agent-sandbox: the condition of a claim, which is ready with an address."""
    condition = {"type": "Ready", "status": "True" if address else "False", "reason": reason, "message": message}
    sandbox = {"sandbox": {"name": f"pool-{name}", "podIPs": [address]}} if address else {}
    status = {"conditions": [{**condition, "lastTransitionTime": TIME}], **sandbox}
    await case.api.patch_status("sandboxclaims", name, status)


async def bind(case: Case, controller: Controller) -> None:
    """Wait for the claims, and give each a sandbox."""
    await hurried(controller, lambda: list(claims(case)) == NAMES, case.status)
    for index, name in enumerate(NAMES):
        await say(case, name, "DependenciesReady", address=f"10.0.0.{index + 1}")


def told(case: Case, reason: str) -> list[str]:
    return [one["message"] for one in case.api.objects.get("events", {}).values() if one["reason"] == reason]


def test_a_job_gets_its_sandboxes_with_its_nodes_and_gives_them_back() -> None:
    async def life(case: Case, controller: Controller) -> None:
        await begin(case)
        await until(lambda: list(claims(case)) == NAMES, case.status)
        await say(case, NAMES[0], "DependenciesReady", address="10.0.0.1")
        await say(case, NAMES[1], "DependenciesNotReady", "Pod is Running but not Ready")
        await hurried(controller, lambda: "Pod is Running but not Ready" in case.status()["message"], case.status)
        assert case.status()["phase"] == "Starting"
        assert not case.job.submitted
        await say(case, NAMES[1], "DependenciesReady", address="fd00::2")
        # No watch reports it, and nobody hurries.
        await case.reaches("Running")
        (body,) = case.job.submitted
        assert _urls(body) == ["http://10.0.0.1:8080", "http://[fd00::2]:8080"]
        owners = [item["metadata"]["ownerReferences"][0] for item in claims(case).values()]
        uid = case.api.objects["rljobs"]["default", "a"]["metadata"]["uid"]
        assert [(owner["kind"], owner["uid"]) for owner in owners] == [("RLJob", uid)] * 2
        case.job.end("SUCCEEDED", 0)
        await hurried(controller, lambda: case.status()["phase"] == "Succeeded", case.status)
        await hurried(controller, lambda: not claims(case))

    play(life)


def _urls(body: dict[str, Any]) -> list[str]:
    packed = body["runtime_env"]["env_vars"]["RLJOB_MANIFEST"]
    spec = load_manifest(json.loads(gzip.decompress(base64.b64decode(packed)))).spec
    assert spec.sandbox is not None
    assert spec.sandbox.service is not None
    return list(spec.sandbox.service.urls or [])


def test_sandboxes_that_never_come_end_the_attempt_and_are_named() -> None:
    async def life(case: Case, controller: Controller) -> None:
        await begin(case, failurePolicy={"maxRestarts": 0})
        await until(lambda: list(claims(case)) == NAMES, case.status)
        for name in NAMES:
            await say(case, name, "WarmPoolNotFound", 'SandboxWarmPool "pool" not found')
        await hurried(controller, lambda: "WarmPoolNotFound" in case.status()["message"], case.status)
        case.api.clock_ahead = 7200.0
        await hurried(controller, lambda: case.status()["phase"] == "Failed", case.status)
        attempt = case.status()["attempts"][-1]
        assert attempt["reason"] == "ReadyTimeout"
        for part in (
            "Sandboxes were not ready within",
            NAMES[0],
            "WarmPoolNotFound",
            'SandboxWarmPool "pool" not found',
        ):
            assert part in attempt["message"], attempt
        await hurried(controller, lambda: not claims(case))

    play(life)


@pytest.mark.parametrize("wrong", ["no such kind", "no right"])
def test_claims_that_cannot_be_read_are_named_with_what_helps(wrong: str) -> None:
    async def life(case: Case, controller: Controller) -> None:
        if wrong == "no such kind":
            case.api.absent.add("sandboxclaims")
        else:
            case.api.fail("GET", "/sandboxclaims", code=403, message='User "x" cannot list', times=10**6)
        await begin(case)
        await hurried(controller, lambda: "cannot be read" in (case.status().get("message") or ""), case.status)
        for part in ("The SandboxClaims of RLJob a", "settings.sandboxClaims: true", "agent-sandbox"):
            assert part in case.status()["message"]
        assert not case.job.submitted
        case.api.absent.clear()
        case.api.faults.clear()
        await bind(case, controller)
        await hurried(controller, lambda: case.status()["phase"] == "Running", case.status)

    play(life)


def test_a_claim_that_may_not_be_made_is_named() -> None:
    async def life(case: Case, controller: Controller) -> None:
        said = 'sandboxclaims is forbidden: User "operator" cannot create resource "sandboxclaims"'
        case.api.fail("POST", "/sandboxclaims", code=403, message=said, times=10**6)
        await begin(case)
        await hurried(controller, lambda: "cannot create resource" in (case.status().get("message") or ""), case.status)
        assert not case.job.submitted
        case.api.faults.clear()
        await bind(case, controller)
        await hurried(controller, lambda: case.status()["phase"] == "Running", case.status)

    play(life)


def test_a_claim_of_somebody_else_is_named_and_left_alone() -> None:
    async def life(case: Case, controller: Controller) -> None:
        await case.api.put("sandboxclaims", {"metadata": {"name": NAMES[1]}, "spec": {"warmPoolRef": {"name": "x"}}})
        await case.api.put("rljobs", manifest(**POOL))
        await until(lambda: ("default", "a") in case.api.objects.get("rayclusters", {}), case.status)
        await make_ready(case.api)
        said = f"SandboxClaim {NAMES[1]} exists and is not this job's; delete it, or give the job another name."
        await until(lambda: said in (case.status().get("message") or ""), case.status)
        assert claims(case)[NAMES[1]]["spec"] == {"warmPoolRef": {"name": "x"}}
        assert not case.job.submitted
        await case.api.remove("sandboxclaims", NAMES[1])
        await bind(case, controller)
        await hurried(controller, lambda: case.status()["phase"] == "Running", case.status)

    play(life)


def test_a_sandbox_that_ended_is_told_once_and_claimed_anew_for_the_next_attempt() -> None:
    async def life(case: Case, controller: Controller) -> None:
        await begin(case, failurePolicy={"backoffSeconds": 1, "maxRestarts": 3})
        await bind(case, controller)
        await case.reaches("Running")
        before = {name: item["metadata"]["uid"] for name, item in claims(case).items()}
        await say(case, NAMES[0], "DependenciesNotReady", "Pod exists with phase: Failed")
        await hurried(controller, lambda: bool(told(case, "SandboxLost")), case.status)
        await say(case, NAMES[0], "PodFailed", "Pod failed")
        asks = case.job.asks
        await hurried(controller, lambda: case.job.asks > asks + 10)
        assert len(told(case, "SandboxLost")) == 1
        assert list(claims(case)) == NAMES, "what runs keeps what it has"
        assert case.status()["phase"] == "Running"
        case.job.end("FAILED", 1)
        await hurried(
            controller,
            lambda: claims(case).get(NAMES[0], {}).get("metadata", {}).get("uid") not in (None, before[NAMES[0]]),
        )
        assert claims(case)[NAMES[1]]["metadata"]["uid"] == before[NAMES[1]], "the other one goes on"
        await say(case, NAMES[0], "DependenciesReady", address="10.0.0.9")
        await hurried(controller, lambda: len(case.job.submitted) == 2, case.status)
        assert _urls(case.job.submitted[1]) == ["http://10.0.0.9:8080", "http://10.0.0.2:8080"]

    play(life)


def test_a_suspended_job_holds_no_sandboxes_even_when_a_release_failed() -> None:
    async def life(case: Case, controller: Controller) -> None:
        await begin(case)
        await bind(case, controller)
        await case.reaches("Running")
        case.api.fail("DELETE", "/sandboxclaims", code=403, message="not now", times=3)
        now = case.api.objects["rljobs"]["default", "a"]
        await case.api.put("rljobs", {**now, "spec": manifest(**POOL, suspend=True)["spec"]})
        await hurried(controller, lambda: not claims(case), case.status)
        await until(lambda: any("not now" in text for text in told(case, "SandboxesNotReleased")))
        for name in ("a-head", "a-worker"):
            await case.api.remove("pods", name)
        await hurried(controller, lambda: case.status()["phase"] == "Suspended", case.status)

    play(life)


def test_claims_of_a_pool_that_the_spec_no_longer_has_are_released() -> None:
    async def life(case: Case, controller: Controller) -> None:
        await begin(case)
        await hurried(controller, lambda: list(claims(case)) == NAMES, case.status)
        case.api.fail("DELETE", "/sandboxclaims", code=403, message="not now", times=1)
        now = case.api.objects["rljobs"]["default", "a"]
        await case.api.put("rljobs", {**now, "spec": manifest(**POOL, suspend=True)["spec"]})
        await until(lambda: bool(told(case, "SandboxesNotReleased")), case.status)
        now = case.api.objects["rljobs"]["default", "a"]
        await case.api.put("rljobs", {**now, "spec": manifest(suspend=True)["spec"]})
        for name in ("a-head", "a-worker"):
            await case.api.remove("pods", name)
        await hurried(controller, lambda: not claims(case), case.status)

    play(life)


def test_sandboxes_go_with_the_devices_that_a_queue_takes() -> None:
    async def life(case: Case, controller: Controller) -> None:
        await begin(case)
        await hurried(controller, lambda: list(claims(case)) == NAMES, case.status)
        cluster = case.api.objects["rayclusters"]["default", "a"]
        held = [{"type": "RayClusterSuspended", "status": "True", "reason": "Yes", "lastTransitionTime": TIME}]
        status = {"observedGeneration": 2, "conditions": held}
        await case.api.put("rayclusters", {**cluster, "spec": {**cluster["spec"], "suspend": True}, "status": status})
        for name in ("a-head", "a-worker"):
            await case.api.remove("pods", name)
        await hurried(controller, lambda: not claims(case), case.status)

    play(life)


def test_an_operator_without_the_right_refuses_the_job() -> None:
    async def run() -> None:
        async with a_case() as case, case.operator(reconcile, render=replace(ALLOWED, sandbox_claims=False)):
            await case.api.put("rljobs", manifest(**POOL))
            await case.reaches("Pending")
            assert case.status()["message"].startswith("spec.sandbox.service.warmPool: the operator has no right")
            assert not case.api.objects.get("rayclusters")
            assert case.api.count("GET", "/sandboxclaims") == 0

    asyncio.run(run())
