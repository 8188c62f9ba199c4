"""Random lives of a job: what must hold at every instant, and that it always gets to an end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from simulation import UID, World, make_spec, with_pool

from rljob_api.schema import structural_schema
from rljob_api.status import JobPhase, RLJobStatus
from rljob_operator.state.observed import PodRole, SubmissionState
from rljob_operator.state.plan import CreateCluster, DeleteCluster, Plan, Submit
from rljob_operator.state.reconcile import reconcile
from rljob_operator.state.sandboxes import warm_pool

FINAL = (JobPhase.SUCCEEDED, JobPhase.FAILED)
STATUS_SCHEMA = Draft202012Validator(structural_schema(RLJobStatus))

FAULTS: dict[str, Callable[[World], None]] = {
    "driver fails": lambda w: w.driver_exits(1),
    "driver is killed": lambda w: w.driver_exits(-9),
    "user error": lambda w: w.driver_exits(2),
    "phase deadline": lambda w: w.driver_exits(4),
    "stopped by someone": lambda w: w.driver_exits(75),
    "ray job stop": lambda w: w.driver_exits(None, SubmissionState.STOPPED),
    "driver hangs": lambda w: w.driver_hangs(),
    "driver stuck": lambda w: w.driver_is_stuck(),
    "head container restarts": lambda w: w.head_container_restarts(),
    "head out of memory": lambda w: w.pod_fails(PodRole.HEAD, "OOMKilled"),
    "worker out of memory": lambda w: w.pod_fails(PodRole.WORKER, "OOMKilled"),
    "worker evicted": lambda w: w.pod_fails(PodRole.WORKER, "Evicted"),
    "head drained": lambda w: w.head_is_drained(),
    "node lost": lambda w: w.node_is_lost(),
    "head's node lost": lambda w: w.node_is_lost(PodRole.HEAD),
    "lost nodes found": lambda w: w.lost_nodes_are_found(),
    "queue takes devices": lambda w: w.queue_takes_devices(),
    "queue admits": lambda w: w.queue_admits(),
    "cluster deleted": lambda w: w.cluster_is_deleted(),
    "stranger's cluster": lambda w: w.stranger_makes_cluster(),
    "stranger leaves": lambda w: w.stranger_leaves(),
    "policy deleted": lambda w: setattr(w, "policy", False),
    "folder lost": lambda w: w.folder_is_lost(),
    "suspend": lambda w: w.edit(suspend=True),
    "resume": lambda w: w.edit(suspend=False),
    "more steps": lambda w: w.edit(steps=w.spec.steps + 6),
    "fewer steps": lambda w: w.edit(steps=max(1, w.spec.steps - 6)),
    "deadline": lambda w: w.edit(active_deadline_seconds=150),
    "checkpoint wanted": lambda w: w.annotate(f"at {w.now}"),
    "no room": lambda w: setattr(w, "capacity", False),
    "room": lambda w: setattr(w, "capacity", True),
    "image missing": lambda w: setattr(w, "image_missing", True),
    "sandbox ends": lambda w: w.sandbox_ends(),
    "no sandboxes": lambda w: setattr(w, "pool_gives", False),
    "sandboxes": lambda w: setattr(w, "pool_gives", True),
    "slow start": lambda w: setattr(w, "start_seconds", 2000.0),
}

LOOK = st.fixed_dictionaries(
    {},
    optional={
        "lag": st.integers(0, 6),
        "ray_answers": st.booleans(),
        "driver_answers": st.booleans(),
        "dies_after": st.integers(0, 4),
        "user_edits_meanwhile": st.booleans(),
    },
)
TURN = st.tuples(
    st.one_of(st.none(), st.sampled_from(sorted(FAULTS))),
    st.sampled_from([0.0, 5.0, 5.0, 20.0, 60.0, 400.0]),
    st.lists(LOOK, max_size=3),
    st.sampled_from([0, 0, 2, 8, 16]),
)
"""A fault, time without an operator, looks under difficulties, looks with none."""
LIVES = st.tuples(st.booleans(), st.lists(TURN, max_size=14))
"""Whether the job runs when the trouble begins, and the trouble."""
Life = tuple[bool, list[tuple[str | None, float, list[dict[str, Any]], int]]]
POLICY = st.fixed_dictionaries(
    {"maxRestarts": st.integers(0, 3)},
    optional={
        "rules": st.lists(
            st.fixed_dictionaries(
                {"action": st.sampled_from(["Restart", "Fail", "Ignore"])},
                optional={
                    "exitCodes": st.lists(st.sampled_from([1, 2, 4, 75, 137]), max_size=2, unique=True),
                    "reasons": st.lists(
                        st.sampled_from(["DriverExited", "HeadLost", "OutOfMemory", "Evicted"]), max_size=2, unique=True
                    ),
                },
            ),
            max_size=2,
            # One that matches every failure is the last.
        ).filter(lambda rules: all(rule.get("exitCodes") or rule.get("reasons") for rule in rules[:-1]))
    },
)


class Witness:
    """Looks over the operator's shoulder."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.known: set[str] = set()
        self.steps = world.spec.steps
        """Steps that the job was to have when it came to its end."""
        world.watch = self.one_driver

    def look(self, **how: Any) -> None:
        world = self.world
        before, actions, runs = world.status, len(world.actions), len(world.runs)
        ended_before = before.phase in FINAL
        plan = world.look(**how)
        self._status(before, plan)
        done = world.actions[actions:]
        if not ended_before:
            self.steps = world.spec.steps
        else:
            assert world.status.phase is before.phase, "a finished job was begun again"
            assert not any(isinstance(action, Submit | CreateCluster) for action in done)
        self._submissions(done, runs)
        self._sandboxes(done)
        for attempt in world.status.attempts:
            if attempt.accepted or attempt.end_time is not None:
                self.known.add(str(attempt.submission_id))
        self.one_driver()

    def _status(self, before: RLJobStatus, plan: Plan) -> None:
        text = plan.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        assert RLJobStatus.model_validate(text) == plan.status
        if any(isinstance(action, Submit | CreateCluster | DeleteCluster) for action in plan.actions):
            assert plan.status_first, "what must not be forgotten is stored before it is done"
        old = {c.type: c for c in before.conditions}
        for new in plan.status.conditions:
            if new.type in old and old[new.type].status == new.status:
                assert new.last_transition_time == old[new.type].last_transition_time
        numbers = [attempt.number for attempt in plan.status.attempts]
        assert all(b == a + 1 for a, b in pairwise(numbers))
        most = self.world.spec.failure_policy.max_restarts
        assert (plan.status.restarts or 0) <= most
        assert sum(attempt.counted for attempt in plan.status.attempts) <= most
        assert (plan.status.restarts or 0) >= (before.restarts or 0)

    def _submissions(self, done: list[Any], runs: int) -> None:
        last = self.world.status.attempts[-1] if self.world.status.attempts else None
        for action in done:
            if isinstance(action, Submit):
                assert last is not None
                assert action.id == last.submission_id == f"rljob-{UID}-{last.number}", "submitted before it was stored"
        for run in self.world.runs[runs:]:
            assert run.id not in self.known, "an attempt that is known to have run was submitted again"

    def _sandboxes(self, done: list[Any]) -> None:
        world, pool = self.world, warm_pool(self.world.spec)
        count = 0 if pool is None else pool.count
        assert len(world.claims) <= count, "more sandboxes than the job asks for"
        ready = sum(claim.ready for claim in world.claims.values())
        assert ready == count or not any(isinstance(action, Submit) for action in done), "a driver without sandboxes"

    def one_driver(self) -> None:
        assert len(self.world.reachable) <= 1, "two drivers at once where both can be seen"
        assert sum(map(self.world.may_commit, self.world.running)) <= 1, "two drivers that can commit"
        places = [(run.id, run.session) for run in self.world.runs]
        assert len(places) == len(set(places)), "Ray ran an id twice"


def play(world: World, life: Life) -> Witness:
    witness = Witness(world)
    begun, turns = life
    while begun and world.status.phase is not JobPhase.RUNNING:
        world.pass_time(5)
        witness.look()
    for fault, pause, looks, quiet_looks in turns:
        if fault is not None:
            FAULTS[fault](world)
        world.pass_time(pause)
        for how in looks:
            witness.look(**how)
        for _ in range(quiet_looks):
            world.pass_time(5)
            witness.look()
            witness.one_driver()
    return witness


def calm(world: World, witness: Witness) -> None:
    """Faults stop, there is room, and strangers leave: from here on the job has to come to an end."""
    world.capacity, world.image_missing, world.start_seconds, world.pool_gives = True, False, 20.0, True
    world.stranger_leaves()
    world.queue_admits()
    for _ in range(400):
        world.pass_time(20)
        witness.look()
        if world.status.phase in (*FINAL, JobPhase.SUSPENDED) and world.cluster is None and not world.claims:
            break


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(life=LIVES, policy=POLICY, sandboxes=st.sampled_from([0, 0, 1, 3]))
@example(
    life=(True, [(None, 60.0, [], 16), ("fewer steps", 0.0, [], 16), ("more steps", 0.0, [], 0)]),
    policy={"maxRestarts": 0},
    sandboxes=0,
)
def test_any_life_keeps_the_invariants_and_comes_to_an_end(life: Life, policy: dict[str, Any], sandboxes: int) -> None:
    failures = {**policy, "backoffSeconds": 5, "maxBackoffSeconds": 60}
    world = World(make_spec(failurePolicy=failures, **with_pool(sandboxes)))
    witness = play(world, life)
    calm(world, witness)
    event(f"ends {world.status.phase}")
    assert world.status.phase in (*FINAL, JobPhase.SUSPENDED), world.status.message
    assert world.cluster is None, "the devices are free"
    assert not world.claims, "so are the sandboxes"
    assert (world.status.phase is JobPhase.SUSPENDED) <= world.spec.suspend
    event(f"attempts {len(world.status.attempts)}")
    text = world.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert list(STATUS_SCHEMA.iter_errors(text)) == []
    plan = world.look()
    assert plan.actions == ()
    assert plan.requeue_after is None
    if world.status.phase is JobPhase.SUCCEEDED:
        assert world.status.progress is not None
        assert world.status.progress.step >= min(witness.steps, world.status.attempts[-1].steps or 0)


def test_the_invariants_notice_two_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is cut off and trains on, and none but the next one's fence stops it; one hangs, and its pod takes long."""
    quiet: Life = (True, [(None, 60.0, [], 16)] * 5)
    cut_off: Life = (True, [("head's node lost", 60.0, [], 16), *quiet[1]])
    hangs: Life = (True, [("driver hangs", 0.0, [], 0), ("head drained", 60.0, [], 16), *quiet[1]])
    spec = make_spec(steps=2000)
    for life in (cut_off, hangs):
        play(World(spec), life)
    world = World(spec)
    world.fences = False
    with pytest.raises(AssertionError, match="two drivers that can commit"):
        play(world, cut_off)
    monkeypatch.setattr("rljob_operator.state.lifecycle.former_head_ends", lambda _: False)
    with pytest.raises(AssertionError, match="two drivers at once where both can be seen"):
        play(World(spec), hangs)


def test_the_invariants_notice_sandboxes_that_are_kept_or_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(**with_pool(2))

    def left() -> int:
        world = World(spec)
        calm(world, play(world, (True, [])))
        return len(world.claims)

    assert left() == 0
    with monkeypatch.context() as patched:
        patched.setattr("rljob_operator.state.lifecycle.release_sandboxes", lambda _: None)
        assert left() == 2
    monkeypatch.setattr("rljob_operator.state.lifecycle.sandbox_problem", lambda _: None)
    with pytest.raises(AssertionError, match="a driver without sandboxes"):
        left()


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(life=LIVES, how=LOOK, sandboxes=st.sampled_from([0, 2]))
@example(life=(False, [(None, 0.0, [{}], 0), (None, 20.0, [], 0), ("worker evicted", 0.0, [], 0)]), how={}, sandboxes=0)
@example(life=(True, [("worker evicted", 0.0, [], 0)]), how={}, sandboxes=0)
@example(life=(True, [("sandbox ends", 0.0, [], 0)]), how={}, sandboxes=2)
def test_a_plan_whose_status_was_stored_changes_nothing_the_second_time(
    life: Life, how: dict[str, Any], sandboxes: int
) -> None:
    world = World(make_spec(**with_pool(sandboxes)))
    play(world, life)
    seen = {name: value for name, value in how.items() if name in ("lag", "ray_answers", "driver_answers")}
    observed = world.observed(**seen)
    first = reconcile(observed, world.now)
    again = reconcile(replace(observed, job=replace(observed.job, status=first.status)), world.now)
    assert again.status == first.status
    assert again.events == ()


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(life=LIVES, pauses=st.lists(st.sampled_from([0, 1, 7]), min_size=40, max_size=40))
def test_goodput_is_the_same_however_often_the_operator_looks(life: Life, pauses: list[int]) -> None:
    """Two operators see the same world; one looks more often. Where both see each change of phase, the sums agree."""
    world = World(make_spec())
    play(world, life)
    calmer = world.observed()
    seldom = often = calmer.job.status
    for pause in pauses:
        world.now += pause
        often = reconcile(replace(calmer, job=replace(calmer.job, status=often)), world.now).status
    plan = reconcile(replace(calmer, job=replace(calmer.job, status=seldom)), world.now)
    if often.phase is plan.status.phase is calmer.job.status.phase:
        assert often.goodput == plan.status.goodput
