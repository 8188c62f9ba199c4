"""The stand-in for Ray answers as Ray does, and the proxy names requests rightly; no cluster is needed."""

from __future__ import annotations

import inspect

import pytest
from aiohttp.test_utils import make_mocked_request
from fault_proxy import classify
from ray_standin import STOP_WAIT_SECONDS, Submission

ray_jobs = pytest.importorskip("ray.dashboard.modules.job.pydantic_models", reason="needs Ray, to compare with it")


def test_job_details_are_rays() -> None:
    submission = Submission("rljob-1-0", {"entrypoint": "true", "metadata": {"a": "b"}})
    submission.end("FAILED", "Job entrypoint command failed", 1, "JOB_ENTRYPOINT_COMMAND_ERROR")
    details = submission.details()
    assert set(details) == set(ray_jobs.JobDetails.model_fields)
    assert ray_jobs.JobDetails(**details).driver_exit_code == 1


def test_messages_and_waits_are_rays() -> None:
    from ray.dashboard.modules.job import common, job_head, job_manager, job_supervisor

    info = common.JobInfo(status="PENDING", entrypoint="true", runtime_env={"env_vars": {}})
    assert Submission("x", {"entrypoint": "true"}).message == info.message
    source = inspect.getsource(job_manager.JobManager)
    assert 'f"Job with submission_id {submission_id} already exists. "' in source
    assert '"Please use a different submission_id."' in source
    assert 'f"Request failed with status code {status}: {error_text}."' in inspect.getsource(job_head)
    assert 'f"Job {job_or_submission_id} does not exist"' in inspect.getsource(job_head)
    assert "last available logs (truncated to 20,000 chars)" in inspect.getsource(job_supervisor)
    assert '"RAY_JOB_STOP_WAIT_TIME_S"' in inspect.getsource(job_supervisor)
    assert job_supervisor.JobSupervisor.DEFAULT_RAY_JOB_STOP_WAIT_TIME_S == STOP_WAIT_SECONDS


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/api/v1/namespaces/a/pods?watch=true", ("watch", "pods", "", "a", "")),
        ("GET", "/api/v1/pods?labelSelector=x", ("list", "pods", "", "", "")),
        ("GET", "/api/v1/namespaces/a", ("get", "namespaces", "", "", "a")),
        ("POST", "/api/v1/namespaces/a/events", ("create", "events", "", "a", "")),
        ("DELETE", "/apis/ray.io/v1/namespaces/a/rayclusters/job", ("delete", "rayclusters", "", "a", "job")),
        (
            "PATCH",
            "/apis/rljob.dev/v1alpha1/namespaces/a/rljobs/job/status?force=true",
            ("patch", "rljobs", "status", "a", "job"),
        ),
    ],
)
def test_requests_are_named(method: str, path: str, expected: tuple[str, ...]) -> None:
    asked = classify(make_mocked_request(method, path))
    assert (asked.verb, asked.resource, asked.subresource, asked.namespace, asked.name) == expected


def test_server_side_apply_is_told_from_other_patches() -> None:
    headers = {"Content-Type": "application/apply-patch+yaml"}
    path = "/apis/rljob.dev/v1alpha1/namespaces/a/rljobs/job"
    assert classify(make_mocked_request("PATCH", path, headers=headers)).verb == "apply"
    assert classify(make_mocked_request("GET", "/readyz")).resource == "/readyz"
