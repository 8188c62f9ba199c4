"""Kueue's label on an RLJob: what it means, what contradicts it, and that it binds what has its devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulation import make_spec

from rljob_api.queue_label import QUEUE_LABEL
from rljob_api.spec import QueueSystem, ResourcesSpec, SchedulingSpec
from rljob_api.status import JobPhase, RLJobStatus
from rljob_api.validation import ManifestError, load_manifest
from rljob_operator.shell.caches.stored_spec import read_spec
from rljob_operator.state.observed import JobView, Observed
from rljob_operator.state.queue_label import by_queue_label
from rljob_operator.state.reconcile import reconcile

NOW = 1_700_000_000.0


def job(label: str | None, phase: JobPhase | None = None, kept: str | None = None, /, **scheduling: Any) -> JobView:
    # As `read_spec` gives it where the label stands for the queue.
    spec = make_spec().model_copy(update={"scheduling": SchedulingSpec.model_validate(scheduling)})
    status = RLJobStatus(phase=phase, queue=kept)
    labels = {} if label is None else {QUEUE_LABEL: label}
    return by_queue_label(JobView("ns", "job", "u", 1, 0.0, spec, status=status, labels=labels))


def queue_of(view: JobView) -> tuple[str, str | None]:
    assert view.spec is not None
    return view.spec.scheduling.system, view.spec.scheduling.queue


@pytest.mark.parametrize("scheduling", [{}, {"system": "Kueue"}, {"system": "Kueue", "queue": "a"}, {"system": "None"}])
def test_the_label_means_kueue_and_its_queue(scheduling: dict[str, Any]) -> None:
    found = job("a", **scheduling)
    assert queue_of(found) == ("Kueue", "a")
    assert (found.problem, found.remark) == ("", "")


@pytest.mark.parametrize("label", [None, ""])
def test_no_label_and_an_empty_one_mean_nothing(label: str | None) -> None:
    assert queue_of(job(label)) == ("None", None)
    assert queue_of(job(label, system="Volcano", queue="v")) == ("Volcano", "v")


@pytest.mark.parametrize(
    ("scheduling", "says"),
    [
        ({"system": "Kueue", "queue": "b"}, "spec.scheduling.queue is 'b'"),
        ({"system": "Volcano", "queue": "b"}, "spec.scheduling.system is Volcano"),
        ({"system": "MindCluster"}, "spec.scheduling.system is MindCluster"),
    ],
)
def test_what_says_otherwise_is_invalid_with_both_values(scheduling: dict[str, Any], says: str) -> None:
    for phase in (None, JobPhase.PENDING, JobPhase.SUSPENDED):
        found = job("a", phase, **scheduling)
        assert says in found.problem
        assert "is 'a'" in found.problem
    manifest = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "job", "labels": {QUEUE_LABEL: "a"}},
        "spec": make_spec(scheduling=scheduling).model_dump(mode="json", by_alias=True, exclude_unset=True),
    }
    with pytest.raises(ManifestError) as error:
        load_manifest(manifest)
    (problem,) = error.value.problems
    assert problem.path == f"metadata.labels[{QUEUE_LABEL}]"
    assert problem.value == "a"
    assert says in str(problem)


def test_a_queue_and_engines_that_come_and_go_exclude_each_other() -> None:
    one = {"nodes": 1, "devicesPerNode": 1}
    spec = make_spec().model_copy(
        update={"resources": ResourcesSpec.model_validate({"rollout": {**one, "minNodes": 1, "maxNodes": 2}})}
    )
    found = by_queue_label(JobView("ns", "job", "u", 1, 0.0, spec, labels={QUEUE_LABEL: "a"}))
    assert "spec.resources.rollout.maxNodes is 2" in found.problem


def test_an_invalid_label_begins_nothing_and_is_told() -> None:
    plan = reconcile(Observed(job("a", system="Volcano")), NOW)
    assert not plan.actions
    assert [event.reason for event in plan.events] == ["InvalidSpec"]
    assert "spec.scheduling.system is Volcano" in (plan.status.message or "")


BUSY = [JobPhase.QUEUED, JobPhase.STARTING, JobPhase.RUNNING]


@pytest.mark.parametrize("phase", BUSY)
@pytest.mark.parametrize(
    ("label", "kept", "scheduling", "stays", "says"),
    [
        ("b", "a", {}, ("Kueue", "a"), "is 'b' now"),
        (None, "a", {}, ("Kueue", "a"), "was taken away"),
        ("b", None, {}, ("None", None), "has no queue"),
        ("b", "a", {"system": "Kueue"}, ("Kueue", "a"), "is 'b' now"),
        ("b", "a", {"system": "Kueue", "queue": "a"}, ("Kueue", "a"), "stays in Kueue's queue 'a'"),
        ("b", "v", {"system": "Volcano", "queue": "v"}, ("Volcano", "v"), "stays in Volcano's queue 'v'"),
    ],
)
def test_changed_on_a_job_that_asks_for_devices_it_is_told_and_has_no_effect(
    phase: JobPhase,
    label: str | None,
    kept: str | None,
    scheduling: dict[str, Any],
    stays: tuple[str, str | None],
    says: str,
) -> None:
    found = job(label, phase, kept, **scheduling)
    assert queue_of(found) == stays
    assert says in found.remark
    assert "has no effect" in found.remark
    assert not found.problem


@pytest.mark.parametrize("phase", BUSY)
def test_a_label_that_did_not_change_is_no_matter(phase: JobPhase) -> None:
    for found in (job("a", phase, "a"), job("a", phase, "a", system="Kueue", queue="a"), job(None, phase)):
        assert not found.remark
        assert not found.problem
    assert queue_of(job("a", phase, "a")) == ("Kueue", "a")


def test_the_remark_is_in_the_status_and_in_one_event() -> None:
    world = job("b", JobPhase.QUEUED, "a")
    first = reconcile(Observed(world), NOW)
    assert [event.reason for event in first.events if event.reason == "NoEffect"] == ["NoEffect"]
    assert world.remark in (first.status.message or "")
    assert first.status.queue == "a"
    again = reconcile(Observed(replace(world, status=first.status)), NOW + 5)
    assert not [event for event in again.events if event.reason == "NoEffect"]


def test_a_suspended_job_takes_the_new_queue() -> None:
    found = job("b", JobPhase.SUSPENDED, "a")
    assert queue_of(found) == (QueueSystem.KUEUE, "b")
    assert not found.remark


@pytest.mark.parametrize(
    ("labels", "status", "problem"),
    [
        ({QUEUE_LABEL: "a", "other": "b"}, {}, None),
        ({}, {"queue": "kept"}, None),
        ({}, {}, r"spec.scheduling.queue: is missing"),
        ({QUEUE_LABEL: ""}, {}, r"spec.scheduling.queue: is missing"),
    ],
)
def test_a_stored_spec_may_leave_its_queue_to_the_label(
    labels: dict[str, str], status: dict[str, str], problem: str | None
) -> None:
    stored: Any = {
        "metadata": {"name": "job", "namespace": "ns", "labels": labels},
        "spec": make_spec().model_dump(mode="json", by_alias=True, exclude_unset=True)
        | {"scheduling": {"system": "Kueue"}},
        "status": status,
    }
    if problem is None:
        spec, unknown = read_spec(stored)
        assert (spec.scheduling.system, spec.scheduling.queue, unknown) == (QueueSystem.KUEUE, None, "")
        return
    with pytest.raises(ManifestError, match=problem):
        read_spec(stored)
