"""The shell with plans of the test's own: what it writes, when, and what a fault in one job does to another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from operator_cases import Case, a_case, fetched, make_ready, manifest, until

from rljob_api.status import JobPhase, RLJobStatus
from rljob_operator.render import RenderSettings
from rljob_operator.shell.api.resources import JobKey
from rljob_operator.state.observed import Observed
from rljob_operator.state.plan import (
    AnnotateWorkload,
    ApplyPolicy,
    ApplySecret,
    CreateCluster,
    DeleteCluster,
    DeleteJob,
    Event,
    Plan,
)

A, B = JobKey("default", "a"), JobKey("default", "b")


def play(test: Callable[[Case], Awaitable[None]]) -> None:
    async def run() -> None:
        async with a_case() as case:
            await test(case)

    asyncio.run(run())


async def put_workload(case: Case, status: dict[str, Any] | None = None, **metadata: Any) -> None:
    """Kueue's Workload of the RayCluster `a`."""
    uid = case.api.objects["rayclusters"]["default", "a"]["metadata"]["uid"]
    owner = {"kind": "RayCluster", "name": "a", "uid": uid, "controller": True}
    item = {"metadata": {"name": "raycluster-a-1", "ownerReferences": [owner], **metadata}}
    await case.api.put("workloads", item if status is None else {**item, "status": status})


def say(text: str, **more: Any) -> Plan:
    return Plan(RLJobStatus(message=text), **more)


def test_an_exception_in_one_job_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    def reconcile(observed: Observed, now: float) -> Plan:
        if observed.job.name == "a":
            raise ZeroDivisionError("rubbish")
        return say("fine")

    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest("a"))
        await case.api.put("rljobs", manifest("b"))
        async with case.operator(reconcile) as controller:
            await until(lambda: case.status("b").get("message") == "fine")
            await until(lambda: "default/a: cannot be reconciled" in caplog.text)
            metrics = (await fetched(controller, "/metrics"))[1]
            assert 'rljob_operator_reconcile_seconds_count{result="error"}' in metrics
            assert (await fetched(controller, "/readyz"))[0] == 200
        assert "default/a: ZeroDivisionError: rubbish; again in" in caplog.text

    play(test)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"spec": {}}, "spec.steps"),
        ({"spec": {"steps": "many", "x" * 5000: 1}}, "spec.steps"),
        ({"spec": None}, "spec"),
    ],
)
def test_a_spec_that_cannot_be_read_is_a_problem_of_that_job(changes: dict[str, Any], names: str) -> None:
    problems: dict[str, str] = {}

    def reconcile(observed: Observed, now: float) -> Plan:
        problems[observed.job.name] = observed.job.problem
        assert (observed.job.spec is None) == (observed.job.name == "a")
        return say("seen")

    async def test(case: Case) -> None:
        await case.api.put("rljobs", {**manifest("a"), **changes})
        await case.api.put("rljobs", manifest("b"))
        async with case.operator(reconcile):
            await until(lambda: len(problems) == 2)
        assert names in problems["a"]
        assert problems["b"] == ""

    play(test)


def test_a_valid_spec_that_cannot_be_rendered_is_kept_beside_its_problem() -> None:
    seen: list[Observed] = []

    def reconcile(observed: Observed, now: float) -> Plan:
        seen.append(observed)
        return say("seen")

    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest("a"))
        async with case.operator(reconcile, render=RenderSettings()) as controller:
            await until(lambda: len(seen) == 1)
            controller.queue.add(A)
            await until(lambda: len(seen) > 1)
        for observed in seen:
            assert observed.job.problem.startswith("spec.image")
            assert observed.job.spec is not None

    play(test)


def test_a_field_of_a_newer_crd_is_a_problem_of_a_job_whose_spec_is_known_otherwise() -> None:
    seen: list[Observed] = []

    def reconcile(observed: Observed, now: float) -> Plan:
        seen.append(observed)
        return say("seen")

    async def test(case: Case) -> None:
        newer = {"rollout": {**manifest()["spec"]["rollout"], "shiny": True}, "wishes": 3}
        await case.api.put("rljobs", manifest("a", **newer))
        async with case.operator(reconcile) as controller:
            await until(lambda: len(seen) == 1)
            # The CRD is taken back: the same generation has the fields no more.
            controller.informers.jobs.learn({**case.api.objects["rljobs"]["default", "a"], **older(case)})
            await until(lambda: len(seen) > 1)
        assert seen[0].job.spec is not None
        assert seen[0].job.spec.rollout.prompts_per_step == 2
        names = "spec.rollout.shiny, spec.wishes: is known to the CRD in the cluster and not to the operator"
        assert seen[0].job.problem.startswith(names)
        assert seen[-1].job.problem == ""

    def older(case: Case) -> Any:
        metadata = case.api.objects["rljobs"]["default", "a"]["metadata"]
        return {**manifest("a"), "metadata": {**metadata, "resourceVersion": str(case.api.version + 1)}}

    play(test)


def test_an_unreadable_status_stops_that_job_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest("a", status={"phase": "Dancing"}))
        await case.api.put("rljobs", manifest("b"))
        async with case.operator(lambda observed, now: say("fine")):
            await until(lambda: case.status("b").get("message") == "fine")
            await until(lambda: "default/a: cannot be reconciled" in caplog.text)
        assert case.status("a") == {"phase": "Dancing"}

    play(test)


def test_an_equal_status_is_not_written_again() -> None:
    looks = 0

    def reconcile(observed: Observed, now: float) -> Plan:
        nonlocal looks
        looks += 1
        return say("same")

    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest())
        async with case.operator(reconcile) as controller:
            for _ in range(5):
                before = looks
                controller.queue.add(A)
                await until(lambda: looks > before)  # noqa: B023  (waited for at once)
        assert case.api.count("PATCH", "/status") == 1
        assert case.status("a")["writes"] == 1

    play(test)


def test_many_running_jobs_are_each_looked_at_less_often() -> None:
    looks: list[float] = []

    def reconcile(observed: Observed, now: float) -> Plan:
        looks.append(now)
        return Plan(RLJobStatus(phase=JobPhase.RUNNING), requeue_after=0.05)

    async def test(case: Case) -> None:
        for name in "abcd":
            await case.api.put("rljobs", manifest(name))
        async with case.operator(reconcile, looks_per_second=8.0):
            await until(lambda: len(looks) >= 20)
        assert looks[19] - looks[3] >= 1.5, "16 looks at 8 in a second, less what began early"

    play(test)


def test_a_running_job_whose_plan_wants_no_look_gets_none() -> None:
    looks = 0

    def reconcile(observed: Observed, now: float) -> Plan:
        nonlocal looks
        looks += 1
        return Plan(RLJobStatus(phase=JobPhase.RUNNING))

    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest())
        async with case.operator(reconcile):
            await until(lambda: looks > 0)
            await asyncio.sleep(0.5)
        assert looks <= 2

    play(test)


def test_a_status_made_of_an_older_job_is_not_written() -> None:
    """The user edits the job after it was looked at and before the status is written."""
    seen: list[bool] = []

    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest())

        def reconcile(observed: Observed, now: float) -> Plan:
            assert observed.job.spec is not None
            seen.append(observed.job.spec.suspend)
            if len(seen) == 1:
                edited = {**case.api.objects["rljobs"]["default", "a"], **{"spec": manifest(suspend=True)["spec"]}}
                # The watch is deaf: only the refused write can tell.
                case.api.silent = True
                asyncio.get_running_loop().create_task(case.api.put("rljobs", edited))
            return say(f"suspend is {observed.job.spec.suspend}")

        case.api.fail("PATCH", "/status", delay=0.1)
        async with case.operator(reconcile):
            await until(lambda: case.status().get("message") == "suspend is True", case.status)
        assert seen == [False, True]

    play(test)


def test_the_next_plan_sees_the_own_write_although_the_watch_does_not() -> None:
    seen: list[tuple[str | None, bool]] = []

    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest())

        def reconcile(observed: Observed, now: float) -> Plan:
            case.api.silent = True
            seen.append((observed.job.status.message, observed.cluster is not None))
            actions = () if observed.cluster else (ApplySecret(), ApplyPolicy(), CreateCluster())
            return say("written", actions=actions, requeue_after=0.05)

        async with case.operator(reconcile):
            await until(lambda: len(seen) >= 3)
        assert seen[0] == (None, False)
        assert set(seen[1:]) == {("written", True)}
        assert case.api.count("POST", "/rayclusters") == 1
        assert case.api.count("POST", "/secrets") == 1

    play(test)


def test_a_deleted_cluster_is_gone_from_the_cache_at_once_and_another_one_stays() -> None:
    seen: list[str | None] = []

    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest("a"))
        await case.api.put("rayclusters", {"metadata": {"name": "a"}})
        uid = case.api.objects["rayclusters"]["default", "a"]["metadata"]["uid"]

        def reconcile(observed: Observed, now: float) -> Plan:
            case.api.silent = True
            seen.append(observed.cluster and observed.cluster.uid)
            actions = (DeleteCluster(uid), DeleteCluster("another"), DeleteCluster("another", wait=False))
            return say("x", actions=actions, requeue_after=0.05)

        async with case.operator(reconcile):
            await until(lambda: len(seen) >= 3)
        assert seen[0] == uid
        assert set(seen[1:]) == {None}
        assert case.api.deletions == [("rayclusters", "Foreground")]

    play(test)


def test_after_a_failed_action_the_status_is_left_and_the_user_is_told() -> None:
    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest())
        case.api.fail("POST", "/rayclusters", code=403, times=1)

        def reconcile(observed: Observed, now: float) -> Plan:
            return say("done", actions=(CreateCluster(),) if observed.cluster is None else ())

        async with case.operator(reconcile):
            await until(lambda: bool(case.api.objects.get("events")))
            assert case.status() == {}
            event = next(iter(case.api.objects["events"].values()))
            assert (event["type"], event["reason"]) == ("Warning", "RequestRefused")
            assert "Making the RayCluster failed" in event["message"]
            await until(lambda: case.status().get("message") == "done")

    play(test)


def test_a_running_attempt_is_asked_about_and_others_are_not() -> None:
    seen: list[Observed] = []

    def reconcile(observed: Observed, now: float) -> Plan:
        seen.append(observed)
        if observed.cluster is None:
            return say("x", actions=(ApplySecret(), CreateCluster()))
        attempt: dict[str, Any] = {"number": 0, "submissionId": "rljob-u-0"}
        started = observed.cluster.ready
        return Plan(
            RLJobStatus.model_validate({"attempt": 0, "attempts": [attempt] if started else []}), requeue_after=0.05
        )

    async def test(case: Case) -> None:
        case.job.step()
        await case.api.put("rljobs", manifest())
        async with case.operator(reconcile, ask_seconds=0.5):
            await until(lambda: ("default", "a") in case.api.objects.get("rayclusters", {}))
            await asyncio.sleep(0.1)
            assert case.job.asks == 0
            await make_ready(case.api)
            await until(lambda: seen[-1].driver is not None, lambda: seen[-1])
            assert seen[-1].submission is not None
            assert seen[-1].submission.state == "MISSING"
            assert seen[-1].submission.session == "session_1"
            assert seen[-1].driver is not None
            assert (seen[-1].driver.step, seen[-1].driver.useful_seconds) == (1, 2.0)
            assert seen[-1].cluster is not None
            assert (seen[-1].cluster.owned, seen[-1].cluster.ready) == (True, True)
            assert [pod.name for pod in seen[-1].pods] == ["a-head", "a-worker"]
            case.job.dead_driver = True
            await until(lambda: "did not answer within 0.5 s" in seen[-1].driver_error, lambda: seen[-1])

    play(test)


def test_what_became_of_the_pods_is_as_new_as_the_answers_about_the_driver() -> None:
    seen: list[Observed] = []

    def reconcile(observed: Observed, now: float) -> Plan:
        seen.append(observed)
        if observed.cluster is None:
            return say("x", actions=(ApplySecret(), CreateCluster()))
        attempt: dict[str, Any] = {"number": 0, "submissionId": "rljob-u-0"}
        attempts = [attempt] if observed.cluster.ready else []
        return Plan(RLJobStatus.model_validate({"attempt": 0, "attempts": attempts}), requeue_after=0.02)

    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest())
        async with case.operator(reconcile, ask_seconds=3.0):
            await until(lambda: ("default", "a") in case.api.objects.get("rayclusters", {}))
            case.job.dead_driver = True
            await make_ready(case.api)
            await until(lambda: case.job.asks > 0)
            looks = len(seen)
            await case.api.patch_status("pods", "a-worker", {"phase": "Failed"})
            await until(lambda: len(seen) > looks)
            assert [pod.phase for pod in seen[looks].pods] == ["Running", "Failed"]

    play(test)


def test_ray_is_not_asked_while_the_driver_of_a_running_attempt_answers() -> None:
    seen: list[Observed] = []
    change: dict[str, Any] = {}

    def reconcile(observed: Observed, now: float) -> Plan:
        seen.append(observed)
        if observed.cluster is None:
            return say("x", actions=(ApplySecret(), CreateCluster()))
        attempt = {"number": 0, "submissionId": "rljob-u-0", "accepted": True, "startStep": 0, **change}
        status = {"attempt": 0, "attempts": [attempt], "observedGeneration": observed.job.generation}
        return Plan(RLJobStatus.model_validate(status), requeue_after=0.02)

    async def looks(number: int) -> None:
        before = len(seen)
        await until(lambda: len(seen) >= before + number)

    async def test(case: Case) -> None:
        case.job.step()
        await case.api.put("rljobs", manifest())
        async with case.operator(reconcile, ask_seconds=0.5):
            await until(lambda: ("default", "a") in case.api.objects.get("rayclusters", {}))
            await make_ready(case.api)
            await until(lambda: bool(seen) and seen[-1].driver is not None)
            await looks(3)
            asked = case.job.asks_of_ray
            await looks(5)
            assert case.job.asks_of_ray == asked
            assert (seen[-1].submission, seen[-1].submission_error) == (None, "")
            assert seen[-1].driver is not None
            change["stopTime"] = "2026-01-01T00:00:00Z"
            await until(lambda: seen[-1].submission is not None)
            del change["stopTime"]
            await until(lambda: seen[-1].submission is None)
            case.job.dead_driver = True
            await until(lambda: seen[-1].submission is not None)
            assert seen[-1].driver is None

    play(test)


def test_what_one_jobs_server_wants_kept_is_sent_to_none() -> None:
    """All heads and drivers are asked through one session."""

    def reconcile(observed: Observed, now: float) -> Plan:
        if observed.cluster is None:
            return say("x", actions=(ApplySecret(), CreateCluster()))
        attempts = [{"number": 0, "submissionId": "rljob-u-0"}] if observed.cluster.ready else []
        return Plan(RLJobStatus.model_validate({"attempt": 0, "attempts": attempts}), requeue_after=0.02)

    async def test(case: Case) -> None:
        # By name: cookies of addresses are not kept in any case.
        case.job.url = case.job.url.replace("127.0.0.1", "localhost")
        await case.api.put("rljobs", manifest())
        async with case.operator(reconcile):
            await until(lambda: ("default", "a") in case.api.objects.get("rayclusters", {}))
            await make_ready(case.api)
            await until(lambda: case.job.asks > 10)
        assert case.job.cookies == {}

    play(test)


def test_a_deleted_job_is_forgotten() -> None:
    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest())

        def reconcile(observed: Observed, now: float) -> Plan:
            return say("x", requeue_after=30.0)

        async with case.operator(reconcile) as controller:
            await until(lambda: case.status().get("message") == "x")
            assert 'rljob="a"' in (await fetched(controller, "/metrics"))[1]
            await case.api.remove("rljobs", "a")
            await until(lambda: not controller._observer._checked)
            assert not controller.queue._timers
            assert not controller._executor._written
            assert 'rljob="a"' not in (await fetched(controller, "/metrics"))[1]

    play(test)


def test_a_job_may_be_deleted_by_plan_and_by_uid() -> None:
    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest())
        async with case.operator(lambda observed, now: say("over", actions=(DeleteJob(),))):
            await until(lambda: not case.api.objects["rljobs"])
        assert case.api.count("PATCH", "/status") == 0

    play(test)


def test_queues_are_watched_where_they_are_and_forgotten_where_they_go() -> None:
    seen: list[Observed] = []

    def reconcile(observed: Observed, now: float) -> Plan:
        seen.append(observed)
        return say("x", actions=() if observed.cluster else (CreateCluster(),))

    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest())
        async with case.operator(reconcile):
            await until(lambda: bool(case.api.objects.get("rayclusters")))
            waits = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "no quota"}
            await put_workload(case, {"conditions": [waits]})
            assert seen[-1].queue is None
            case.api.groups["kueue.x-k8s.io"] = {"v1beta2": ["workloads"], "v1beta1": ["workloads"]}
            await until(lambda: seen[-1].queue is not None)
            queue = seen[-1].queue
            assert queue is not None
            assert (queue.admitted, queue.reason, queue.message) == (False, "Pending", "no quota")
            assert queue.object == "Workload raycluster-a-1"
            case.api.groups.clear()
            case.api.absent.add("workloads")
            await case.api.drop_watches()
            await until(lambda: seen[-1].queue is None)

    play(test)


def test_kueues_workload_is_told_what_a_preemption_costs_and_another_one_is_not() -> None:
    told: list[tuple[str, str] | None] = []

    def reconcile(observed: Observed, now: float) -> Plan:
        workload = observed.queue.workload if observed.queue is not None else None
        if workload is None:
            return say("x", actions=() if observed.cluster else (CreateCluster(),))
        told.append((workload.boost, workload.last_checkpoint))
        uid = "another" if len(told) == 2 else workload.uid
        boost, saved = (4, "2026-01-01T00:00:00Z") if len(told) < 3 else (0, "")
        return say(f"{len(told)}", actions=(AnnotateWorkload(workload.name, uid, boost, saved),))

    async def test(case: Case) -> None:
        case.api.groups["kueue.x-k8s.io"] = {"v1beta2": ["workloads"]}
        await case.api.put("rljobs", manifest())
        async with case.operator(reconcile) as controller:
            await until(lambda: bool(case.api.objects.get("rayclusters")))
            await put_workload(case, annotations={"kept": "yes"})
            await until(lambda: case.status().get("message") == "1")
            notes = {"kueue.x-k8s.io/priority-boost": "4", "rljob.dev/last-checkpoint": "2026-01-01T00:00:00Z"}
            workload = lambda: case.api.objects["workloads"]["default", "raycluster-a-1"]["metadata"]  # noqa: E731
            assert workload()["annotations"] == {"kept": "yes", **notes}
            controller.queue.add(A)
            await until(lambda: len(told) > 2)
            await until(lambda: "rljob.dev/last-checkpoint" not in workload()["annotations"])
            assert workload()["annotations"] == {"kept": "yes", "kueue.x-k8s.io/priority-boost": "0"}
            assert told[1] == told[2] == ("4", "2026-01-01T00:00:00Z")

    play(test)


def test_a_workload_that_may_not_be_written_holds_nothing_back() -> None:
    def reconcile(observed: Observed, now: float) -> Plan:
        workload = observed.queue.workload if observed.queue is not None else None
        if workload is None:
            return say("x", actions=() if observed.cluster else (CreateCluster(),))
        return say("told", actions=(AnnotateWorkload(workload.name, workload.uid, 4, ""),))

    async def test(case: Case) -> None:
        case.api.groups["kueue.x-k8s.io"] = {"v1beta2": ["workloads"]}
        case.api.fail("PATCH", "/workloads/", code=403, message="may not", times=1000)
        await case.api.put("rljobs", manifest())
        async with case.operator(reconcile):
            await until(lambda: bool(case.api.objects.get("rayclusters")))
            await put_workload(case)
            await until(lambda: case.status().get("message") == "told")

            def told() -> list[dict[str, Any]]:
                events = case.api.objects.get("events", {}).values()
                return [event for event in events if event["reason"] == "PriorityNotBoosted"]

            await until(lambda: bool(told()))
            (event,) = told()
            assert "Telling Kueue what a preemption would cost failed" in str(event)

    play(test)


def test_only_the_given_namespaces_are_watched() -> None:
    async def test(case: Case) -> None:
        for namespace in ("one", "two", "three"):
            item = manifest("a")
            await case.api.put("rljobs", {**item, "metadata": {**item["metadata"], "namespace": namespace}})
        async with case.operator(lambda observed, now: say("x"), namespaces=("one", "two")):
            jobs = case.api.objects["rljobs"]
            await until(lambda: all("status" in jobs[name, "a"] for name in ("one", "two")))
        assert "status" not in case.api.objects["rljobs"]["three", "a"]
        lists = [path for verb, path in case.api.requests if verb == "GET" and "limit=" in path]
        assert all("/namespaces/one/" in path or "/namespaces/two/" in path for path in lists)

    play(test)


def test_readiness_names_what_is_missing() -> None:
    async def test(case: Case) -> None:
        case.api.absent.add("rayclusters")
        async with case.operator(lambda observed, now: say("x")) as controller:
            await until(lambda: controller.informers.jobs is not None and bool(controller.informers.needed[1].problem))
            code, text = await fetched(controller, "/readyz")
            assert (code, "rayclusters.ray.io; is its CRD installed" in text) == (503, True)
            assert (await fetched(controller, "/healthz"))[0] == 200
            case.api.absent.clear()
            await until(lambda: not controller.informers.problem)
            assert (await fetched(controller, "/readyz")) == (200, "ok\n")

    play(test)


def test_a_slow_api_server_ends_at_the_deadline_and_the_job_is_looked_at_again() -> None:
    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest())
        case.api.fail("PATCH", "/status", delay=100.0)
        async with case.operator(lambda observed, now: say("x"), request_seconds=0.3):
            await until(lambda: case.status().get("message") == "x")
            assert case.api.count("PATCH", "/status") >= 2

    play(test)


def test_events_of_plans_are_sent() -> None:
    async def test(case: Case) -> None:
        await case.api.put("rljobs", manifest())
        event = Event("Normal", "Seen", "The job was seen.")
        async with case.operator(lambda observed, now: say("x", events=(event,))) as controller:
            await until(lambda: bool(case.api.objects.get("events")))
            for _ in range(5):
                controller.queue.add(A)
                await asyncio.sleep(0.02)
        (sent,) = case.api.objects["events"].values()
        assert (sent["reason"], sent["message"], sent["involvedObject"]["name"]) == ("Seen", "The job was seen.", "a")
        assert sent["involvedObject"]["uid"] == case.api.objects["rljobs"]["default", "a"]["metadata"]["uid"]

    play(test)


logging.getLogger("rljob_operator").setLevel(logging.DEBUG)
