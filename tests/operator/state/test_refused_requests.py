"""Kubernetes' words for a refusal, and that they reach status, event and `why`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulation import World, make_spec

from rljob_api.status import JobPhase
from rljob_operator.state.explain import explain
from rljob_operator.state.observed import Observed
from rljob_operator.state.plan import ApplySecret, CreateCluster
from rljob_operator.state.reconcile import reconcile
from rljob_operator.state.refusals import REASONS, refusal

WEBHOOK = (
    'Internal error occurred: failed calling webhook "gone.example.com": failed to call webhook: Post '
    '"https://gone.default.svc:443/check?timeout=2s": service "gone" not found'
)
POLICY = (
    "rayclusters.ray.io \"a\" is forbidden: ValidatingAdmissionPolicy 'cost-centre' with binding 'cost-centre' denied "
    "request: The label cost-centre is missing."
)
SAID = [
    (WEBHOOK, "WebhookFailing", "does not answer"),
    (POLICY, "AdmissionDenied", "labels of the RLJob"),
    ('admission webhook "vray.example.com" denied the request: no owner', "AdmissionDenied", "labels of the RLJob"),
    (
        'rayclusters.ray.io "a" is forbidden: exceeded quota: objects, requested: count/rayclusters.ray.io=1, used: '
        "count/rayclusters.ray.io=2, limited: count/rayclusters.ray.io=2",
        "ResourceQuota",
        "ResourceQuota has to be raised",
    ),
    (
        'secrets "a-driver" is forbidden: unable to create new content in namespace team because it is being '
        "terminated",
        "NamespaceTerminating",
        "being deleted",
    ),
    (
        'RayCluster in version "v1" cannot be handled as a RayCluster: strict decoding error: unknown field '
        '"spec.authOptions"',
        "FieldUnknown",
        "jobs.kuberayVersion",
    ),
    (
        'rayclusters.ray.io is forbidden: User "system:serviceaccount:rljob:rljob" cannot create resource '
        '"rayclusters" in API group "ray.io" in the namespace "team"',
        "RightMissing",
        "lacks a right",
    ),
    ('RayCluster.ray.io "a" is invalid: spec.headGroupSpec: Required value', "ObjectInvalid", "spec.pods"),
    ("the server is on fire", "RequestRefused", ""),
]


@pytest.mark.parametrize(("said", "reason", "helps"), SAID, ids=[reason for _, reason, _ in SAID])
def test_a_refusal_is_told_in_its_own_words_in_status_and_why(said: str, reason: str, helps: str) -> None:
    cause = refusal("Making the RayCluster failed", said)
    assert cause.reason == reason
    assert reason in REASONS
    assert said.rstrip(".") in cause.message
    assert helps in cause.message
    world = World(make_spec())
    plan = reconcile(replace(world.observed(), refused=cause), world.now)
    assert any(isinstance(action, CreateCluster) for action in plan.actions), "it is tried again"
    queued = next(c for c in plan.status.conditions if c.type == "Queued")
    assert (plan.status.phase, queued.reason) == (JobPhase.QUEUED, reason)
    assert plan.status.message == queued.message == cause.message
    found = explain(Observed(replace(world.observed().job, status=plan.status), refused=cause))
    assert (found.reason, found.message) == (reason, cause.message)


def test_once_it_is_taken_nothing_is_left_of_the_refusal() -> None:
    world = World(make_spec())
    cause = refusal("Making the RayCluster failed", WEBHOOK)
    world.status = reconcile(replace(world.observed(), refused=cause), world.now).status
    world.run(300)
    assert world.status.phase is JobPhase.RUNNING
    assert "webhook" not in world.status.model_dump_json()


def test_an_old_refusal_says_nothing_of_a_job_that_needs_no_object() -> None:
    world = World(make_spec())
    world.run(20)
    plan = reconcile(replace(world.observed(), refused=refusal("Making the RayCluster failed", WEBHOOK)), world.now)
    assert not any(isinstance(action, ApplySecret | CreateCluster) for action in plan.actions)
    assert "webhook" not in (plan.status.message or "")
