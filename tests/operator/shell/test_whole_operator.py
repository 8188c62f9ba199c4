"""The real reconciler in the real shell: a job's whole life, and what interrupts it."""

from __future__ import annotations

import asyncio
import copy
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from fake_api import TIME, Fault
from operator_cases import SETTINGS, SPEC, Case, a_case, fetched, hurried, make_ready, manifest, ray_pod, until

from rljob_operator.ray.http import NoAnswer
from rljob_operator.shell.api.resources import JobKey
from rljob_operator.shell.jobs.controller import Controller
from rljob_operator.state.observed import Observed
from rljob_operator.state.plan import Plan
from rljob_operator.state.reconcile import reconcile
from rljob_operator.state.timing import seconds_of

NO_IMAGE = replace(SETTINGS.render, worker_image="")
STEPS = 'rljob_step_seconds_count{namespace="default",rljob="a"}'


def play(test: Callable[[Case], Awaitable[None]]) -> None:
    async def run() -> None:
        async with a_case() as case:
            await test(case)

    asyncio.run(run())


async def to_running(case: Case) -> None:
    await case.api.put("rljobs", manifest())
    await until(lambda: ("default", "a") in case.api.objects.get("rayclusters", {}), case.status)
    await make_ready(case.api)
    await case.reaches("Running")


async def edit(case: Case, **spec: Any) -> None:
    now = case.api.objects["rljobs"]["default", "a"]
    await case.api.put("rljobs", {**now, "spec": manifest(**spec)["spec"]})


async def suspend(case: Case, controller: Controller) -> None:
    """The user suspends the job, and KubeRay deletes its pods with the cluster."""
    await edit(case, suspend=True)
    await until(lambda: len(case.job.stops) == 1)
    await hurried(controller, lambda: not case.api.objects["rayclusters"], case.status)
    for name in ("a-head", "a-worker"):
        await case.api.remove("pods", name)
    await hurried(controller, lambda: case.status()["phase"] == "Suspended", case.status)


def engines_of(case: Case) -> dict[str, Any]:
    group: dict[str, Any] = case.api.objects["rayclusters"]["default", "a"]["spec"]["workerGroupSpecs"][1]
    return group


def test_nodes_with_engines_are_scaled_while_the_job_runs() -> None:
    def elastic(nodes: int) -> dict[str, Any]:
        return {
            "mode": "Async",
            "resources": {
                "profile": "cpu",
                "trainer": {"nodes": 1},
                "rollout": {"nodes": nodes, "minNodes": 1, "maxNodes": 3},
            },
        }

    async def life(case: Case) -> None:
        case.job.engine_nodes = {"wanted": 1, "taking_part": 1, "in_use": ["10.0.0.1"]}
        async with case.operator(reconcile) as controller:
            await case.api.put("rljobs", manifest(**elastic(1)))
            await until(lambda: ("default", "a") in case.api.objects.get("rayclusters", {}), case.status)
            group = engines_of(case)
            assert [group[name] for name in ("replicas", "minReplicas", "maxReplicas")] == [1, 1, 3]
            await make_ready(case.api)
            await case.reaches("Running")
            cluster = case.api.objects["rayclusters"]["default", "a"]
            for number in (1, 2):
                pod = ray_pod(f"a-engines-{number}", "worker", cluster)
                pod["metadata"]["labels"]["ray.io/group"] = "engines"
                pod["status"]["podIP"] = f"10.0.0.{number}"
                await case.api.put("pods", pod)

            await edit(case, **elastic(2))
            await hurried(controller, lambda: engines_of(case)["replicas"] == 2, case.status)
            case.job.engine_nodes = {"wanted": 2, "taking_part": 2, "in_use": ["10.0.0.1", "10.0.0.2"]}
            await hurried(controller, lambda: case.status()["cluster"]["engineNodes"] == 2, case.status)
            await edit(case, **elastic(1))
            await hurried(controller, lambda: case.job.engine_nodes["wanted"] == 1, case.status)
            assert engines_of(case)["replicas"] == 2, "a pod went before the driver was done with it"
            case.job.engine_nodes = {"wanted": 1, "taking_part": 1, "in_use": ["10.0.0.2"]}
            await hurried(controller, lambda: engines_of(case)["replicas"] == 1, case.status)
            assert engines_of(case)["scaleStrategy"] == {"workersToDelete": ["a-engines-1"]}
            assert engines_of(case)["template"], "the rest of the group is as it was"

    play(life)


def policy_of(case: Case) -> dict[str, Any]:
    return case.api.objects["networkpolicies"]["default", "a-head"]


def writes_of_policy(case: Case) -> int:
    return sum(case.api.count(method, "/networkpolicies") for method in ("POST", "PATCH", "DELETE"))


def test_from_creation_to_success_with_few_writes() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile) as controller:
            await to_running(case)
            verbs = [f"{method} {path}" for method, path in case.api.requests]
            writes = [verb for verb in verbs if not verb.startswith("GET") and "/leases" not in verb]
            writes = [verb for verb in writes if "/events" not in verb]
            assert len(writes) <= 8, writes
            assert len(case.job.submitted) == 1
            case.job.step()
            case.job.step()
            controller.queue.add(next(controller.informers.jobs.jobs()))
            await until(lambda: len(case.job.asked_after) > 1)
            case.job.end("SUCCEEDED", 0)
            await hurried(controller, lambda: case.status()["phase"] == "Succeeded", case.status)
            assert case.status()["attempts"][-1]["exitCode"] == 0
            _, metrics = await fetched(controller, "/metrics")
            assert f"{STEPS} 2" in metrics

    play(life)


def test_what_a_driver_cannot_write_is_an_event_of_its_job() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile) as controller:
            await to_running(case)
            case.job.unwritten = {"trajectories": "/run/trajectories: Read-only file system"}

            def told() -> list[str]:
                written = case.api.objects.get("events", {}).values()
                return [event["message"] for event in written if event["reason"] == "WriteFailed"]

            await hurried(controller, lambda: bool(told()), case.status)
            (message,) = told()
            assert message.endswith(
                "cannot write trajectories and goes on without: " + case.job.unwritten["trajectories"]
            )
            assert case.status()["attempts"][-1]["unwritten"] == ["trajectories"]

    play(life)


def test_a_finished_job_causes_no_request() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile) as controller:
            await to_running(case)
            case.job.end("SUCCEEDED", 0)
            await hurried(controller, lambda: case.status()["phase"] == "Succeeded", case.status)
            # The event of the end is written after the phase.
            await until(
                lambda: "Succeeded" in str(case.api.objects.get("events")), lambda: case.api.objects.get("events")
            )
            await asyncio.sleep(0.3)
            before, asks = list(case.api.requests), case.job.asks
            for _ in range(5):
                controller.queue.add(next(controller.informers.jobs.jobs()))
                await asyncio.sleep(0.05)
            later = [path for _, path in case.api.requests[len(before) :] if "/leases" not in path]
            assert [path for path in later if "/apis/kueue" not in path and "/apis/scheduling" not in path] == []
            assert case.job.asks == asks

    play(life)


def test_pods_of_a_finished_job_are_not_looked_at_and_those_of_the_next_one_are() -> None:
    async def life(case: Case) -> None:
        looks: list[set[str]] = []
        ended = asyncio.Event()

        def unhurried(observed: Observed, now: float) -> Plan:
            """Reconcile without looks that no event asks for, once the first job has ended."""
            looks.append({pod.terminated_message for pod in observed.pods})
            plan = reconcile(observed, now)
            return replace(plan, requeue_after=None) if ended.is_set() else plan

        async def say(text: str) -> None:
            pod = case.api.objects["pods"]["default", "a-worker"]
            await case.api.put("pods", {**pod, "status": {**pod["status"], "message": text}})
            pods = controller.informers.pods
            await until(lambda: text in {known.terminated_message for known in pods.of_job(JobKey("default", "a"))})

        async with case.operator(unhurried) as controller:
            await to_running(case)
            case.job.end("SUCCEEDED", 0)
            await hurried(controller, lambda: not case.api.objects["rayclusters"], case.status)
            ended.set()
            await asyncio.sleep(0.5)
            await say("it ends")
            await asyncio.sleep(0.5)
            assert not any("it ends" in seen for seen in looks)
            before = len(looks)
            await case.api.remove("rljobs", "a")
            await until(lambda: not list(controller.informers.jobs.jobs()))
            # With a spec that is refused nothing is made for it, of which events would come.
            await case.api.put("rljobs", manifest(image="", steps=0))
            await until(lambda: len(looks) > before)
            await asyncio.sleep(0.5)
            await say("it is new")
            await until(lambda: any("it is new" in seen for seen in looks))

    play(life)


def test_an_operator_that_starts_again_counts_each_step_once() -> None:
    async def life(case: Case) -> None:
        for _ in range(2500):
            case.job.step()
        async with case.operator(reconcile):
            await to_running(case)
        case.job.step()
        async with case.operator(reconcile) as controller:
            await until(lambda: controller.leader.leads)
            code = 503
            while code != 200:
                code, metrics = await fetched(controller, "/metrics")
                assert code == 200 or "records are being read" in metrics
            assert f"{STEPS} 2501" in metrics, [line for line in metrics.splitlines() if STEPS[:20] in line]
            assert len(case.job.submitted) == 1

    play(life)


@pytest.mark.parametrize(("page", "size"), [(1, 0), (7, 0), (1000, 100_000)])
def test_an_operator_that_starts_again_reads_short_pages(page: int, size: int) -> None:
    """A driver ends a page where it gets too long, after one record if need be."""

    async def life(case: Case) -> None:
        case.job.page = page
        for _ in range(20):
            case.job.step(size=size)
        async with case.operator(reconcile):
            await to_running(case)
        case.job.step(size=size)
        async with case.operator(reconcile) as controller:
            await until(lambda: controller.leader.leads)
            while (await fetched(controller, "/metrics"))[0] != 200:
                await asyncio.sleep(0.02)
            _, metrics = await fetched(controller, "/metrics")
            assert f"{STEPS} 21" in metrics, [line for line in metrics.splitlines() if STEPS[:20] in line]
            assert 'rljob_operator_record_errors_total{cause="answer"} 0.0' in metrics

    play(life)


@pytest.mark.parametrize(
    ("answer", "cause", "says"),
    [
        ({"steps": None, "total": 4}, "answer", "what are no step records"),
        ({"steps": [{"index": 3}], "total": 4}, "content", "step record 3: step must be a whole number"),
    ],
)
def test_a_driver_whose_records_cannot_be_read_runs_on(
    answer: dict[str, Any], cause: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile, status_seconds=0.05) as controller:
            for _ in range(3):
                case.job.step()
            await to_running(case)
            case.job.step()
            case.job.steps_answer = answer
            await hurried(controller, lambda: case.status()["progress"]["step"] == 4, case.status)
            status = case.status()
            assert (status["phase"], status["goodput"]["usefulSeconds"]) == ("Running", 6.0)
            assert "4 of 1000 steps are done; its step records cannot be read: " in status["message"]
            assert says in status["message"]
            looks = case.job.asks
            await hurried(controller, lambda: case.job.asks > looks + 10)
            told = [one for one in caplog.records if one.levelname == "WARNING" and says in one.getMessage()]
            assert [one.getMessage().split(": ")[0] for one in told] == ["default/a"]
            _, metrics = await fetched(controller, "/metrics")
            (count,) = re.findall(f'rljob_operator_record_errors_total{{cause="{cause}"}} (.*)', metrics)
            assert float(count) > 1
            case.job.steps_answer = None
            await hurried(controller, lambda: case.status()["goodput"]["usefulSeconds"] == 8.0, case.status)
            await hurried(controller, lambda: "records" not in case.status()["message"], case.status)

    play(life)


def test_a_job_that_is_up_to_date_does_not_wait_for_the_records_of_others() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile, status_seconds=0.05, rebuild_seconds=0.3) as controller:
            case.job.step()
            await to_running(case)
            async with AsyncExitStack() as stack:
                for _ in range(4):
                    await stack.enter_async_context(controller._observer._catching_up)
                case.job.step()
                await hurried(controller, lambda: case.status()["goodput"]["usefulSeconds"] == 4.0, case.status)
                for _ in range(20):
                    case.job.step(size=100_000)
                # More than a small page: they are not waited for, and the driver's own answer counts.
                await hurried(controller, lambda: case.status()["progress"]["step"] == 22, case.status)
                assert case.status()["goodput"]["usefulSeconds"] == 4.0
                assert "took more than 0.3 s" in case.status()["message"]
            await hurried(controller, lambda: case.status()["goodput"]["usefulSeconds"] == 44.0, case.status)

    play(life)


def test_one_dead_driver_does_not_keep_the_metrics_of_the_others() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile):
            await to_running(case)
        case.job.dead_driver = True
        async with case.operator(reconcile, ask_seconds=0.5) as controller:
            await until(lambda: controller.leader.leads)
            async with asyncio.timeout(60):
                while (await fetched(controller, "/metrics"))[0] != 200:
                    await asyncio.sleep(0.05)

    play(life)


def test_progress_alone_is_written_at_most_once_in_the_given_time() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile, status_seconds=1.5) as controller:
            await to_running(case)
            key = next(controller.informers.jobs.jobs())
            await asyncio.sleep(1.6)
            before, began = case.api.count("PATCH", "/status"), time.monotonic()
            for _ in range(20):
                case.job.step()
                controller.queue.add(key)
                await asyncio.sleep(0.05)
            writes, seconds = case.api.count("PATCH", "/status") - before, time.monotonic() - began
            assert writes <= 1 + seconds / 1.5
            await until(lambda: case.status()["progress"]["step"] == 20, case.status)

    play(life)


def test_suspending_stops_the_driver_and_gives_the_cluster_back() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile) as controller:
            await to_running(case)
            await suspend(case, controller)
            assert case.status()["attempts"][-1]["counted"] is False

    play(life)


def test_a_job_that_runs_is_followed_to_its_end_by_an_operator_that_could_not_begin_it() -> None:
    """Its image came from the operator's settings, which have none any more."""

    async def life(case: Case) -> None:
        async with case.operator(reconcile):
            await to_running(case)
        async with case.operator(reconcile, render=NO_IMAGE) as controller:
            await until(lambda: "spec.image" in case.status()["message"], case.status)
            assert case.status()["phase"] == "Running"
            case.job.end("SUCCEEDED", 0)
            await hurried(controller, lambda: case.status()["phase"] == "Succeeded", case.status)
            assert case.status()["attempts"][-1]["exitCode"] == 0
            await until(lambda: not case.api.objects["rayclusters"])

    play(life)


def test_a_job_that_runs_can_be_suspended_by_an_operator_that_could_not_begin_it() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile):
            await to_running(case)
        async with case.operator(reconcile, render=NO_IMAGE) as controller:
            await suspend(case, controller)

    play(life)


def test_a_job_that_cannot_be_rendered_is_refused() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile, render=NO_IMAGE):
            await case.api.put("rljobs", manifest())
            await case.reaches("Pending")
            status = case.status()
            assert status["message"].startswith("spec.image: is missing")
            assert [(c["type"], c["status"], c["reason"]) for c in status["conditions"]] == [
                ("Queued", "False", "InvalidSpec")
            ]
            assert "startTime" not in status
        for kind in ("rayclusters", "networkpolicies", "secrets"):
            assert not case.api.objects.get(kind)

    play(life)


def test_a_resumed_job_gets_the_policy_that_its_spec_asks_for_now() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile) as controller:
            await to_running(case)
            assert writes_of_policy(case) == 1
            await suspend(case, controller)
            await edit(case, network={**SPEC["network"], "hostNetwork": True})
            await until(lambda: bool(case.api.objects["rayclusters"]), case.status)
            assert len(policy_of(case)["spec"]["ingress"]) == 3, "workers in the nodes' network reach the head"
            assert writes_of_policy(case) == 2

    play(life)


def test_a_policy_that_is_switched_off_selects_no_pod_any_more() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile) as controller:
            await to_running(case)
            await suspend(case, controller)
            await edit(case, network={**SPEC["network"], "networkPolicy": False})
            await until(lambda: bool(case.api.objects["rayclusters"]), case.status)
            assert policy_of(case)["spec"]["podSelector"]["matchLabels"]["ray.io/node-type"] == "none"
            assert writes_of_policy(case) == 2

    play(life)


def test_a_job_that_wants_no_policy_gets_none() -> None:
    async def life(case: Case) -> None:
        await case.api.put("rljobs", manifest(network={**SPEC["network"], "networkPolicy": False}))
        async with case.operator(reconcile):
            await until(lambda: bool(case.api.objects.get("rayclusters")), case.status)
            await make_ready(case.api)
            await case.reaches("Running")
        assert writes_of_policy(case) == 0

    play(life)


def test_the_policies_of_running_jobs_admit_an_operator_that_was_installed_anew_elsewhere() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile):
            await to_running(case)
        elsewhere = replace(SETTINGS.render, operator_namespace="elsewhere", operator_pod_labels={"app": "two"})
        async with case.operator(reconcile, render=elsewhere):
            await until(lambda: writes_of_policy(case) == 2)
            (operator,) = policy_of(case)["spec"]["ingress"][1]["from"]
            assert operator["podSelector"]["matchLabels"] == {"app": "two"}
            assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "elsewhere"}
            assert case.status()["phase"] == "Running"
        async with case.operator(reconcile, render=elsewhere) as controller:
            await hurried(controller, lambda: case.job.asks_of_ray > 3)
        assert writes_of_policy(case) == 2

    play(life)


def test_a_policy_that_is_deleted_or_loses_its_labels_while_a_job_runs_is_restored() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile):
            await to_running(case)
            await case.api.remove("networkpolicies", "a-head")
            await until(lambda: ("default", "a-head") in case.api.objects["networkpolicies"])
            assert writes_of_policy(case) == 2
            bare = {name: value for name, value in policy_of(case)["metadata"].items() if name != "labels"}
            await case.api.put("networkpolicies", {**policy_of(case), "metadata": bare})
            await until(lambda: policy_of(case)["metadata"].get("labels", {}).get("rljob.dev/job") == "a")

    play(life)


def test_what_the_api_server_adds_to_a_policy_is_left_there() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile) as controller:
            await to_running(case)
            spec = {**policy_of(case)["spec"], "policyTypes": ["Ingress", "Egress"], "egress": [{}]}
            await case.api.put("networkpolicies", {**policy_of(case), "spec": spec})
            asks = case.job.asks
            await hurried(controller, lambda: case.job.asks > asks + 5)
            assert writes_of_policy(case) == 1

    play(life)


def test_two_operators_do_not_take_a_policy_from_each_other_all_the_time() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile) as controller:
            await to_running(case)
            for _ in range(3):
                theirs = {**policy_of(case)["metadata"], "annotations": {"rljob.dev/spec-digest": "another"}}
                await case.api.put("networkpolicies", {**policy_of(case), "metadata": theirs})
                asks = case.job.asks
                await hurried(controller, lambda: case.job.asks > asks + 5)  # noqa: B023  (waited for at once)
            assert writes_of_policy(case) == 2

    play(life)


def test_a_policy_of_somebody_else_is_not_touched() -> None:
    async def life(case: Case) -> None:
        theirs = {"metadata": {"name": "a-head"}, "spec": {"podSelector": {}}}
        await case.api.put("networkpolicies", theirs)
        async with case.operator(reconcile):
            await case.api.put("rljobs", manifest("a"))
            events = case.api.objects
            await until(
                lambda: any("a-head exists" in event["message"] for event in events.get("events", {}).values()),
                lambda: events.get("events"),
            )
            assert policy_of(case)["spec"] == {"podSelector": {}}
            assert "ownerReferences" not in policy_of(case)["metadata"]
            assert not case.api.objects.get("rayclusters"), "its head would be open"
            await case.api.remove("networkpolicies", "a-head")
            await until(lambda: bool(case.api.objects.get("rayclusters")), case.status)

    play(life)


def test_a_secret_or_cluster_of_somebody_else_is_not_touched() -> None:
    async def life(case: Case) -> None:
        theirs = {"metadata": {"name": "a", "labels": {"by": "hand"}}, "spec": {"rayVersion": "2.0"}}
        await case.api.put("rayclusters", theirs)
        await case.api.put("secrets", {"metadata": {"name": "b-driver"}, "data": {"token": "eA=="}})
        async with case.operator(reconcile):
            await case.api.put("rljobs", manifest("a"))
            await case.api.put("rljobs", manifest("b"))
            await until(lambda: bool(case.status("a").get("message")), case.status)
            assert case.api.objects["rayclusters"]["default", "a"]["spec"] == {"rayVersion": "2.0"}
            events = case.api.objects
            await until(
                lambda: any("b-driver exists" in event["message"] for event in events.get("events", {}).values()),
                lambda: events.get("events"),
            )
            assert case.api.objects["secrets"]["default", "b-driver"]["data"] == {"token": "eA=="}

    play(life)


def test_a_cluster_that_was_put_back_is_looked_after() -> None:
    """etcd from a backup: a job of after it is gone, and what the user asks then is seen though versions went back."""

    async def life(case: Case) -> None:
        async with case.operator(reconcile, status_seconds=0.1) as controller:
            await to_running(case)
            backup, version = copy.deepcopy(case.api.objects), case.api.version
            case.job.step()
            await hurried(controller, lambda: (case.status().get("progress") or {}).get("step", 0) >= 1, case.status)
            await case.api.put("rljobs", manifest("ghost", suspend=True))
            await until(lambda: ("default", "ghost") in controller.informers.jobs.jobs())
            case.api.put_back(backup, version)
            # The API server is gone meanwhile. When the watches are opened again, the versions may have caught up.
            case.api.fail("GET", "/", watch=True, times=12, code=503)
            await case.api.drop_watches()
            await edit(case, suspend=True)
            case.api.version += 1000
            await until(lambda: len(case.job.stops) == 1, case.status, 20.0)
            assert list(controller.informers.jobs.jobs()) == [("default", "a")]

    play(life)


def test_a_driver_that_refuses_a_checkpoint_does_not_hold_back_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob_operator.state.reconcile.RUNNING_LOOK_SECONDS", 0.1)

    async def life(case: Case) -> None:
        async with case.operator(reconcile, status_seconds=0.1) as controller:
            await to_running(case)
            case.job.refuses_checkpoints = True
            now = case.api.objects["rljobs"]["default", "a"]
            asked = {**now["metadata"], "annotations": {"rljob.dev/checkpoint-requested": "now"}}
            await case.api.put("rljobs", {**now, "metadata": asked})
            # Looked at as always, and not more and more seldom as after a failure.
            await until(lambda: case.job.checkpoints >= 8, lambda: case.job.checkpoints, 4.0)
            case.job.step()
            await until(lambda: case.status()["progress"]["step"] == 1, case.status, 2.0)
            assert "checkpointRequest" not in case.status()
            assert f"{STEPS} 1" in (await fetched(controller, "/metrics"))[1]
            events = case.api.objects["events"]
            await until(
                lambda: "CheckpointNotRequested" in {event["reason"] for event in events.values()}, lambda: events
            )
            assert "CheckpointRequested" not in {event["reason"] for event in events.values()}
            case.job.refuses_checkpoints = False
            await until(lambda: "checkpointRequest" in case.status(), case.status)

    play(life)


def test_the_api_servers_clock_counts_and_not_the_replicas_own() -> None:
    """Times of the status are compared with what another replica wrote, whose clock may be another one."""

    async def life(case: Case) -> None:
        case.api.clock_ahead = -3600.0
        async with case.operator(reconcile):
            await case.api.put("rljobs", manifest())
            await until(lambda: "startTime" in case.status(), case.status)
        assert abs(time.time() - 3600 - seconds_of(case.status()["startTime"])) < 600
        case.api.clock_ahead = 0.0
        async with case.operator(reconcile):
            await edit(case, suspend=True)
            await case.reaches("Suspended")
        since = next(c for c in case.status()["conditions"] if c["type"] == "Suspended")["lastTransitionTime"]
        assert abs(time.time() - seconds_of(since)) < 600

    play(life)


def test_a_strangers_cluster_that_is_made_at_the_same_instant_is_not_taken_over() -> None:
    async def life(case: Case) -> None:
        meta = {"name": "a", "namespace": "default", "uid": "theirs", "resourceVersion": "11", "generation": 1}
        theirs = {"metadata": {**meta, "creationTimestamp": TIME}, "spec": {"rayVersion": "2.60.0"}}

        def is_first(request: web.Request) -> bool:
            """Nothing came between a look at what is there and this request but the stranger's own."""
            if request.method in ("POST", "PATCH") and "/rayclusters" in request.path:
                clusters = case.api.objects.setdefault("rayclusters", {})
                clusters.setdefault(("default", "a"), copy.deepcopy(theirs))
            return False

        case.api.faults.append(Fault(is_first))
        async with case.operator(reconcile):
            await case.api.put("rljobs", manifest())
            await until(lambda: "NameTaken" in str(case.status()), case.status)
            assert case.api.objects["rayclusters"]["default", "a"] == theirs

    play(life)


def test_no_token_goes_where_the_status_of_a_cluster_leads() -> None:
    async def life(case: Case) -> None:
        async with case.operator(reconcile) as controller:
            await to_running(case)
            key = next(iter(controller.informers.jobs.jobs()))
            state = controller.informers.clusters.get(*key)
            assert state is not None
            for service in (
                "evil.example.com/",
                "a@evil.example.com",
                "evil.example.com:80#",
                "other-head-svc",
                "",
            ):
                led = replace(state, view=replace(state.view, head_service=service))
                with pytest.raises(NoAnswer, match="no token goes there"):
                    await controller._observer.ray_jobs(key, led)

    play(life)
