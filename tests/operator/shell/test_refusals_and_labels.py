"""A whole operator: what an API server refuses reaches the user, and an RLJob's labels reach its RayCluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from operator_cases import SETTINGS, Case, a_case, manifest, until

from rljob_api.queue_label import QUEUE_LABEL
from rljob_operator.state.reconcile import reconcile

WEBHOOK = 'failed calling webhook "gone.example.com": failed to call webhook: Post "https://gone.svc": no such host'
POLICY = "ValidatingAdmissionPolicy 'cost-centre' denied request: The label cost-centre is missing."


def play(test: Callable[[Case], Awaitable[None]]) -> None:
    async def run() -> None:
        async with a_case() as case:
            await test(case)

    asyncio.run(run())


def events(case: Case, reason: str) -> list[dict[str, Any]]:
    return [event for event in case.api.objects.get("events", {}).values() if event["reason"] == reason]


def labelled(labels: dict[str, str], **spec: Any) -> dict[str, Any]:
    item = manifest(**spec)
    return {**item, "metadata": {**item["metadata"], "labels": labels}}


@pytest.mark.parametrize(
    ("path", "code", "said", "reason"),
    [
        ("/rayclusters", 500, WEBHOOK, "WebhookFailing"),
        ("/rayclusters", 422, POLICY, "AdmissionDenied"),
        ("/secrets", 403, 'secrets "a" is forbidden: exceeded quota: objects', "ResourceQuota"),
        ("/networkpolicies", 403, 'User "operator" cannot create resource "networkpolicies"', "RightMissing"),
    ],
)
def test_a_refused_object_is_in_status_and_event_until_it_is_taken(
    path: str, code: int, said: str, reason: str
) -> None:
    async def test(case: Case) -> None:
        fault = case.api.fail("POST", path, code=code, message=said, times=1000)
        await case.api.put("rljobs", manifest())
        async with case.operator(reconcile, status_seconds=0.1):
            await until(lambda: said.rstrip(".") in case.status().get("message", ""), case.status)
            assert case.status()["phase"] == "Queued"
            (queued,) = [c for c in case.status()["conditions"] if c["type"] == "Queued"]
            assert (queued["status"], queued["reason"]) == ("True", reason)
            await until(lambda: bool(events(case, "RequestRefused")), case.status)
            assert said in events(case, "RequestRefused")[0]["message"]
            fault.times = 0
            await until(lambda: bool(case.api.objects.get("rayclusters")), case.status)
            await until(lambda: said.rstrip(".") not in case.status().get("message", ""), case.status)

    play(test)


def test_no_field_of_a_cluster_is_dropped_without_a_word() -> None:
    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest())
        async with case.operator(reconcile, status_seconds=0.1):
            await until(lambda: bool(case.api.objects.get("rayclusters")), case.status)
        (path,) = [path for verb, path in case.api.requests if verb == "POST" and "/rayclusters" in path]
        assert "fieldValidation=Strict" in path

    play(test)


def test_labels_go_on_under_chosen_prefixes_and_none_that_are_set() -> None:
    labels = {
        "cost-centre": "7",
        "team.example.org/owner": "me",
        "app.kubernetes.io/instance": "argo",
        "app.kubernetes.io/managed-by": "Helm",
        "rljob.dev/job": "another",
        "ray.io/cluster": "another",
        "volcano.sh/queue-name": "mine",
        "other.example.org/x": "y",
        QUEUE_LABEL: "team-queue",
    }

    async def test(case: Case) -> None:
        await case.api.put("rljobs", labelled(labels))
        render = replace(SETTINGS.render, label_prefixes=("team.example.org",))
        async with case.operator(reconcile, render=render, status_seconds=0.1):
            await until(lambda: bool(case.api.objects.get("rayclusters")), case.status)
            assert case.api.objects["rayclusters"]["default", "a"]["metadata"]["labels"] == {
                "cost-centre": "7",
                "team.example.org/owner": "me",
                "rljob.dev/job": "a",
                "app.kubernetes.io/managed-by": "rljob-operator",
                "app.kubernetes.io/component": "cluster",
                QUEUE_LABEL: "team-queue",
            }
            await until(lambda: case.status().get("queue") == "team-queue", case.status)

    play(test)


def test_a_label_that_is_changed_later_is_told_without_any_other_news() -> None:
    async def test(case: Case) -> None:
        await case.api.put("rljobs", labelled({QUEUE_LABEL: "a"}))
        async with case.operator(reconcile, status_seconds=0.1):
            await until(lambda: bool(case.api.objects.get("rayclusters")), case.status)
            item = case.api.objects["rljobs"]["default", "a"]
            await case.api.put("rljobs", {**item, "metadata": {**item["metadata"], "labels": {QUEUE_LABEL: "b"}}})
            await until(lambda: bool(events(case, "NoEffect")), case.status)
            assert f"{QUEUE_LABEL} is 'b' now" in events(case, "NoEffect")[0]["message"]
            assert case.status()["queue"] == "a"
            assert case.api.objects["rayclusters"]["default", "a"]["metadata"]["labels"][QUEUE_LABEL] == "a"

    play(test)


def test_a_label_that_contradicts_the_spec_is_refused_and_begins_once_it_is_corrected() -> None:
    async def test(case: Case) -> None:
        item = labelled({QUEUE_LABEL: "a"}, scheduling={"system": "Kueue", "queue": "b"})
        await case.api.put("rljobs", item)
        async with case.operator(reconcile, status_seconds=0.1):
            await case.reaches("Pending")
            assert "is 'a' and spec.scheduling.queue is 'b'" in case.status()["message"]
            assert not case.api.objects.get("rayclusters")
            stored = case.api.objects["rljobs"]["default", "a"]
            await case.api.put("rljobs", {**stored, "metadata": {**stored["metadata"], "labels": {QUEUE_LABEL: "b"}}})
            await until(lambda: bool(case.api.objects.get("rayclusters")), case.status)

    play(test)
