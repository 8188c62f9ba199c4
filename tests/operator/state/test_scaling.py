"""More or fewer nodes with engines while a job runs: what the driver is asked for, and which pods go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from simulation import World, make_spec

from rljob_api.spec import RLJobSpec
from rljob_api.status import JobPhase
from rljob_api.wire.driver_status import EngineNodes
from rljob_operator.state.observed import EngineGroupView, GonePod, Observed, PodRole, PodView
from rljob_operator.state.plan import Plan, ScaleEngines, Stop, Submit, WantEngineNodes
from rljob_operator.state.reconcile import reconcile

Running = Callable[..., World]


def engine(number: int, *, ready: bool = True, deleting: bool = False, cluster: str) -> PodView:
    address = f"10.0.0.{number}" if ready else None
    return PodView(
        f"job-engines-{number}",
        f"uid-{number}",
        PodRole.WORKER,
        "Running" if ready else "Pending",
        ready,
        deleting,
        cluster_uid=cluster,
        group="engines",
        address=address,
        scheduled=1_700_000_000.0 + number,
    )


def spec(wanted: int, bounds: dict[str, int]) -> RLJobSpec:
    """Spec of a job whose engines have so many nodes of their own."""
    rollout = {"nodes": wanted, "devicesPerNode": 1, **bounds}
    resources = {"nodes": 1, "devicesPerNode": None, "trainer": {"nodes": 1}, "rollout": rollout}
    return make_spec(mode="Async", resources=resources)


def seen(
    world: World,
    wanted: int,
    pods: dict[int, bool],
    asked: int | None,
    used: tuple[int, ...] = (),
    replicas: int | None = None,
    most: int | None = 4,
) -> Observed:
    """A job that wants so many nodes; its pods, and whether each is ready; what its driver was asked for and uses."""
    observed = world.observed()
    assert observed.cluster is not None
    assert observed.driver is not None
    nodes = None if asked is None else EngineNodes(asked, len(used), [f"10.0.0.{number}" for number in used])
    return replace(
        observed,
        job=replace(observed.job, spec=spec(wanted, {} if most is None else {"minNodes": 1, "maxNodes": most})),
        cluster=replace(observed.cluster, engine_group=EngineGroupView(1, len(pods) if replicas is None else replicas)),
        pods=(
            *(pod for pod in observed.pods if pod.role is PodRole.HEAD),
            *(engine(number, ready=ready, cluster=observed.cluster.uid) for number, ready in pods.items()),
        ),
        driver=replace(observed.driver, engine_nodes=nodes),
    )


def done(plan: Plan) -> list[WantEngineNodes | ScaleEngines]:
    return [action for action in plan.actions if isinstance(action, WantEngineNodes | ScaleEngines)]


def look(observed: Observed, world: World) -> list[WantEngineNodes | ScaleEngines]:
    return done(reconcile(observed, world.now))


BOTH = {1: True, 2: True}


def test_more_nodes_are_asked_for_at_once(running: Running) -> None:
    world = running()
    observed = seen(world, 3, BOTH, asked=2, used=(1, 2))
    assert observed.cluster is not None
    plan = reconcile(observed, world.now)
    assert done(plan) == [
        WantEngineNodes(3),
        ScaleEngines(observed.cluster.uid, EngineGroupView(1, 2), 3),
    ]
    assert plan.status.phase is JobPhase.RUNNING
    assert plan.status.cluster is not None
    assert plan.status.cluster.engine_nodes == 2
    assert [event.reason for event in plan.events] == ["EnginesScaled"]
    assert look(seen(world, 3, BOTH, asked=3, used=(1, 2), replicas=3), world) == []


def test_a_pod_goes_when_nothing_of_the_job_is_on_its_node(running: Running) -> None:
    world = running()
    assert look(seen(world, 1, BOTH, asked=2, used=(1, 2)), world) == [WantEngineNodes(1)]
    assert look(seen(world, 1, BOTH, asked=1, used=(1, 2)), world) == []
    (scaled,) = look(seen(world, 1, BOTH, asked=1, used=(1,)), world)
    assert isinstance(scaled, ScaleEngines)
    assert (scaled.replicas, scaled.pods) == (1, ("job-engines-2",))


def test_a_pod_that_is_not_ready_goes_before_one_that_is(running: Running) -> None:
    world = running()
    pods = {1: True, 2: True, 3: False}
    (scaled,) = look(seen(world, 2, pods, asked=2, used=(1, 2)), world)
    assert isinstance(scaled, ScaleEngines)
    assert scaled.pods == ("job-engines-3",)
    (scaled,) = look(seen(world, 1, pods, asked=1, used=(1, 2)), world)
    assert isinstance(scaled, ScaleEngines)
    assert (scaled.replicas, scaled.pods) == (2, ("job-engines-3",))


@pytest.mark.parametrize("asked", [None, 2])
def test_no_pod_goes_before_the_driver_has_said_which_it_uses(running: Running, asked: int | None) -> None:
    world = running()
    observed = seen(world, 1, BOTH, asked)
    assert not any(isinstance(action, ScaleEngines) for action in look(observed, world))
    assert look(replace(observed, driver=None), world) == []


def test_a_driver_that_says_nothing_of_nodes_is_asked_for_nothing(running: Running) -> None:
    world = running()
    assert look(seen(world, 2, BOTH, asked=None), world) == []


def test_without_bounds_nothing_is_scaled(running: Running) -> None:
    world = running()
    assert look(seen(world, 3, BOTH, asked=None, most=None), world) == []


@pytest.mark.parametrize(("group", "stopped"), [("engines", False), ("trainers", True)])
def test_the_attempt_is_stopped_for_a_lost_trainers_pod_and_not_for_engines(
    running: Running, group: str, stopped: bool
) -> None:
    """However long it lasts, and however many were lost before: the driver goes on without them."""
    world = running()
    observed = seen(world, 2, BOTH, asked=2, used=(1, 2))
    assert observed.cluster is not None
    lost = replace(engine(3, cluster=observed.cluster.uid), group=group)
    for _ in range(30):
        observed = replace(
            observed, job=replace(observed.job, status=world.status), gone_pods=(GonePod(lost, world.now),)
        )
        world.now += 5
        plan = reconcile(observed, world.now)
        world.status = plan.status
        if any(isinstance(action, Stop) for action in plan.actions):
            break
    assert (world.status.attempts[-1].stop_time is not None) == stopped
    assert (world.status.attempts[-1].reason == "PodLost") == stopped


@pytest.mark.parametrize(
    ("least", "ready", "node", "begins"),
    [(1, True, None, True), (2, True, None, False), (1, False, None, False), (1, True, "n1", False)],
    ids=["", "too few", "not ready", "starting"],
)
def test_a_job_begins_with_the_nodes_that_there_are(
    world: World, least: int, ready: bool, node: str | None, begins: bool
) -> None:
    """With `minNodes` at least, and not without one that has a node and is only not ready yet."""
    observed = seen_before(world, 2, least)
    assert observed.cluster is not None
    uid, head = observed.cluster.uid, next(pod for pod in observed.pods if pod.role is PodRole.HEAD)
    pods = (
        replace(head, ready=True, node="n0"),
        replace(engine(0, cluster=uid), group="trainers", node="n0"),
        replace(engine(1, cluster=uid), node="n1", ready=ready),
        replace(engine(2, ready=False, cluster=uid), node=node, unschedulable="" if node else "0/2 nodes"),
    )
    cluster = replace(observed.cluster, desired_workers=3)
    plan = reconcile(replace(observed, cluster=cluster, pods=pods), world.now)
    assert any(isinstance(action, Submit) for action in plan.actions) == begins
    assert plan.status.phase == (JobPhase.QUEUED if least == 2 else JobPhase.STARTING)


def test_before_an_attempt_any_pod_may_go(world: World) -> None:
    observed = seen_before(world, 1)
    assert observed.cluster is not None
    pods = tuple(engine(number, cluster=observed.cluster.uid) for number in (1, 2))
    (scaled,) = look(replace(observed, pods=pods), world)
    assert isinstance(scaled, ScaleEngines)
    assert (scaled.replicas, scaled.pods) == (1, ("job-engines-2",))


def seen_before(world: World, wanted: int, least: int = 1) -> Observed:
    """A job whose pods begin; its RayCluster has two for engines."""
    for _ in range(60):
        world.pass_time(5)
        world.look()
        if any(pod.node for pod in world.pods):
            break
    observed = world.observed()
    assert world.status.attempts == []
    assert observed.cluster is not None
    cluster = replace(observed.cluster, ready=False, engine_group=EngineGroupView(1, 2))
    return replace(
        observed, job=replace(observed.job, spec=spec(wanted, {"minNodes": least, "maxNodes": 4})), cluster=cluster
    )
