"""Every reason for which an attempt ends has its facts, and every pod's end is reported in one way."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from simulation import World, make_spec

from rljob_api.spec import FailureReason
from rljob_api.status import AttemptStatus, JobPhase
from rljob_operator.metrics.lifecycle import REASONS
from rljob_operator.state.causes import Cause
from rljob_operator.state.failures import decide, pod_failure
from rljob_operator.state.observed import ClusterView, GonePod, JobView, Observed, PodRole, PodView
from rljob_operator.state.pod_causes import pod_problem
from rljob_operator.state.pod_ends import pod_end
from rljob_operator.state.reasons import FACTS, EndReason, caused, said_of, severity

ENDS: list[tuple[FailureReason, dict[str, Any]]] = [
    (FailureReason.NODE_LOST, {"node_lost": True}),
    (FailureReason.EVICTED, {"phase": "Failed", "terminated_reason": "Evicted"}),
    (FailureReason.OUT_OF_MEMORY, {"phase": "Failed", "terminated_reason": "OOMKilled", "exit_code": 137}),
    (FailureReason.POD_LOST, {"phase": "Failed", "exit_code": 1}),
]


def worker(name: str, **fields: Any) -> PodView:
    return replace(PodView(name, name, PodRole.WORKER, "Running", ready=False, node="n"), **fields)


def observed(*pods: PodView) -> Observed:
    head = PodView("head", "head", PodRole.HEAD, "Running", ready=True)
    cluster = ClusterView("job", "c", ready=False, desired_workers=2)
    return Observed(JobView("ns", "job", "u", 1, 0.0, make_spec()), cluster, (head, *pods))


def test_each_reason_has_its_facts() -> None:
    assert set(FACTS) == {*FailureReason, *EndReason}
    for reason, facts in FACTS.items():
        assert facts.sentence
        assert not facts.sentence.endswith(".")
        assert said_of(reason, None) == f"{facts.sentence}."


@pytest.mark.parametrize("reason", FailureReason)
def test_each_failure_reason_is_judged_ranked_and_counted(reason: FailureReason) -> None:
    decision = decide(make_spec().failure_policy, caused(reason), 1, asked_to_stop=False)
    assert decision.action is FACTS[reason].action
    assert severity(caused(reason)) == list(FailureReason).index(reason)
    assert reason in REASONS


def test_any_two_causes_are_ranked_in_one_way() -> None:
    causes = [*(caused(reason) for reason in FailureReason), Cause("OfANewerOperator", "")]
    for found in permutations(causes, 2):
        assert min(found, key=severity) is min(reversed(found), key=severity)


@pytest.mark.parametrize(("reason", "fields"), ENDS, ids=[reason for reason, _ in ENDS])
def test_both_readers_of_pods_tell_the_same(reason: FailureReason, fields: dict[str, Any]) -> None:
    pod = worker("w", **fields)
    end = pod_end(pod)
    assert end is not None
    assert end.reason == reason
    failure = pod_failure(observed(pod), AttemptStatus(number=0, head_uid="head"))
    problem = pod_problem(observed(pod), make_spec())
    assert failure is not None
    assert problem is not None
    assert (failure.reason, failure.message) == (reason, f"Worker pod w {end.message}")
    assert problem.reason == ("ContainerExited" if reason is FailureReason.POD_LOST else reason)
    assert problem.message.startswith(f"Pod w {end.message.rstrip('.')}")


@pytest.mark.parametrize("pair", list(permutations(ENDS, 2)), ids=lambda pair: f"{pair[0][0]}-{pair[1][0]}")
def test_of_two_pods_the_deeper_cause_is_told(pair: tuple[tuple[FailureReason, dict[str, Any]], ...]) -> None:
    deeper = min((reason for reason, _ in pair), key=list(FailureReason).index)
    pods = [worker(f"w{place}", **fields) for place, (_, fields) in enumerate(pair)]
    failure = pod_failure(observed(*pods), AttemptStatus(number=0, head_uid="head"))
    problem = pod_problem(observed(*pods), make_spec())
    assert failure is not None
    assert problem is not None
    assert failure.reason == deeper
    assert problem.reason == ("ContainerExited" if deeper is FailureReason.POD_LOST else deeper)


def test_a_pod_that_fails_in_any_way_ends_no_look(running: Any) -> None:
    """A reason without a rank would end each look at the job whose pod meets it."""
    for _, fields in ENDS:
        world: World = running()
        seen = world.observed()
        lost = [replace(pod, **fields) if pod.role is PodRole.WORKER else pod for pod in seen.pods]
        both = replace(seen, pods=tuple(lost), gone_pods=tuple(GonePod(pod, world.now) for pod in lost[1:]))
        assert pod_failure(both, world.status.attempts[0]) is not None
        assert world.look().status.phase is JobPhase.RUNNING
