"""Findings of `rljob doctor` in a job's worker pods, or finds now through the job's Ray cluster."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from rljob_api.wanted import DOCTOR, WANTED_VARIABLE, Wanted
from rljob_operator.kubernetes_objects import ContainerStatus, PodObject
from rljob_operator.plugin.cluster import Cluster
from rljob_operator.plugin.head import Head, open_head
from rljob_operator.plugin.observe import parse_job
from rljob_operator.plugin.problems import CommandError
from rljob_operator.plugin.ray_log import open_log
from rljob_operator.ray.http import NoAnswer
from rljob_operator.render.ray_cluster import valid_spec
from rljob_operator.shell.api.client import ApiError
from rljob_operator.shell.api.resources import PODS, RAY_CLUSTERS, JobKey
from rljob_operator.shell.caches.views import cluster_state
from rljob_operator.state.observed import JobView, SubmissionState

_LOOK_SECONDS = 2.0
_RUN_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Examination:
    """One pod's."""

    pod: str
    node: str | None
    state: str
    """`passed`, `problems`, `running` or `waiting`."""
    message: str = ""
    """The problems, as the pod's status keeps them."""
    report: str = ""
    """The doctor's output; empty where it cannot be read."""


async def examinations(cluster: Cluster, name: str) -> tuple[list[Examination], str]:
    """Findings of the init containers of a job's worker pods, and why their output is missing, if it is.

    Raises:
        CommandError: the job or its pods cannot be read.
    """
    await cluster.job(name)
    pods = await cluster.list(
        PODS, cluster.namespace, "list the job's pods", {"labelSelector": f"ray.io/cluster={name}"}
    )
    found: list[Examination] = []
    unseen = ""
    for pod in sorted(pods, key=lambda item: str(item["metadata"]["name"])):
        status = _status(pod)
        if status is None:
            continue
        state, message, again = _last_run(status)
        report = ""
        if state != "waiting":
            try:
                report = await cluster.client.text(
                    PODS.path(cluster.namespace, pod["metadata"]["name"], "log"),
                    {"container": DOCTOR, "previous": str(again).lower()},
                )
            except ApiError as error:
                unseen = unseen or f"the doctor's output in pod {pod['metadata']['name']} cannot be read: {error}"
        found.append(
            Examination(pod["metadata"]["name"], (pod.get("spec") or {}).get("nodeName"), state, message, report)
        )
    return found, unseen


def _status(pod: PodObject) -> ContainerStatus | None:
    """Status of the doctor's container; empty before the pod has a node, None where the pod has no doctor."""
    containers = (pod.get("spec") or {}).get("initContainers") or ()
    if all(container.get("name") != DOCTOR for container in containers):
        return None
    statuses = (pod.get("status") or {}).get("initContainerStatuses") or ()
    waiting: ContainerStatus = {"name": DOCTOR}
    return next((status for status in statuses if status["name"] == DOCTOR), waiting)


def _last_run(status: ContainerStatus) -> tuple[str, str, bool]:
    """State and problems by the last run that ended, if one did, and whether another has begun since.

    The kubelet starts one that found problems again and again: what counts is what it found last.
    """
    now = status.get("state") or {}
    running = "running" in now
    ended = now.get("terminated") or (status.get("lastState") or {}).get("terminated")
    if not ended:
        return ("running" if running else "waiting"), "", False
    return ("passed" if ended.get("exitCode") == 0 else "problems"), str(ended.get("message") or "").strip(), running


async def examine_now(cluster: Cluster, name: str) -> tuple[bool, str]:
    """Run the doctor on all nodes of the job's Ray cluster, as a Ray job of its own.

    Returns:
        Whether there were no problems, and the doctor's output.

    Raises:
        CommandError: there is no cluster, or it cannot be reached or does not answer in time.
    """
    job = parse_job(await cluster.job(name))
    item = await cluster.find(RAY_CLUSTERS, name)
    state = None if item is None else cluster_state(item)
    if state is None or state.owner_uid != job.uid or state.view.head_pod is None:
        raise CommandError(f"RLJob {name} has no running cluster to be examined; see `kubectl rljob why {name}`")
    async with open_head(cluster, JobKey(job.namespace, job.name), job.uid, state) as head:
        try:
            return await _run(head, job)
        except NoAnswer as error:
            raise CommandError(f"the doctor cannot be run on the head of {name}: {error}") from None


async def _run(head: Head, job: JobView) -> tuple[bool, str]:
    jobs = await head.jobs()
    submission = f"{DOCTOR}-{job.uid}-{time.time_ns()}"
    wanted = Wanted.of(valid_spec(job)).model_dump_json(by_alias=True, exclude_defaults=True)
    await jobs.submit(
        {
            "entrypoint": f'rljob doctor --ray --wanted "${WANTED_VARIABLE}"',
            "submission_id": submission,
            "runtime_env": {"env_vars": {WANTED_VARIABLE: wanted}},
            "metadata": {"rljob": f"{job.namespace}/{job.name}", "purpose": DOCTOR},
            "entrypoint_num_cpus": 0,
        }
    )
    try:
        async with asyncio.timeout(_RUN_SECONDS):
            while (view := await jobs.get(submission)).state.runs:
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        await jobs.stop(submission)
        raise NoAnswer(f"it was not done within {_RUN_SECONDS:g} s and was stopped") from None
    text = view.message
    if view.log_file:
        async with open_log(head, view.log_file, -1) as content:
            text = (await content.read()).decode(errors="replace")
    return view.state is SubmissionState.SUCCEEDED, text
