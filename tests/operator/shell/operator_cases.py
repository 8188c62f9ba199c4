"""A whole operator in this process, beside a fake API server and a fake job."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from fake_api import TIME, FakeApi, serving
from fake_job import FakeJob, serving_job
from kubernetes.aio.client import Configuration

from rljob_operator.render import RenderSettings
from rljob_operator.settings import Settings
from rljob_operator.shell.api.access import Access
from rljob_operator.shell.caches.informer import WatchTimes
from rljob_operator.shell.jobs.controller import Controller, Reconcile

SPEC: dict[str, Any] = {
    "steps": 1000,
    "model": {"path": "/models/m"},
    "data": {"path": "/data/d.jsonl"},
    "reward": {"name": "math"},
    "rollout": {"promptsPerStep": 2, "samplesPerPrompt": 2, "maxResponseTokens": 8},
    "resources": {"profile": "cpu", "nodes": 1, "devicesPerNode": 1},
    "network": {"rayAuthentication": "Off"},
    "storage": {"volumes": [{"name": "runs", "mountPath": "/rljob", "claim": "runs"}]},
}
SETTINGS = Settings(
    render=RenderSettings(worker_image="worker:1", kuberay_version=(1, 6, 2), operator_namespace="rljob-system"),
    identity="one",
    http_host="127.0.0.1",
    http_port=0,
    ask_seconds=3.0,
    rebuild_seconds=5.0,
    request_seconds=2.0,
    stop_seconds=2.0,
    lease_seconds=15.0,
    renew_seconds=10.0,
    retry_seconds=0.1,
    optional_kinds_seconds=0.2,
)
TIMES = WatchTimes(server=30.0, inactivity=2.0, first_pause=0.02, longest_pause=0.1)


def access_to(url: str) -> Access:
    """Access to a server that asks for nothing."""
    return Access(Configuration(host=url), ssl.create_default_context())


def manifest(name: str = "a", status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    item: dict[str, Any] = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {**SPEC, **spec},
    }
    return {**item, "status": status} if status else item


def ready_cluster(api: FakeApi, name: str = "a") -> dict[str, Any]:
    """The status that KubeRay writes once all pods are ready."""
    generation = api.objects["rayclusters"]["default", name]["metadata"]["generation"]
    return {
        "state": "ready",
        "observedGeneration": generation,
        "desiredWorkerReplicas": 1,
        "readyWorkerReplicas": 1,
        "head": {"podName": f"{name}-head", "serviceName": f"{name}-head-svc"},
        "conditions": [
            {"type": kind, "status": "True", "reason": "Yes", "lastTransitionTime": TIME}
            for kind in ("HeadPodReady", "RayClusterProvisioned")
        ],
    }


def ray_pod(name: str, role: str, cluster: dict[str, Any]) -> dict[str, Any]:
    job, uid = cluster["metadata"]["name"], cluster["metadata"]["uid"]
    return {
        "metadata": {
            "name": name,
            "ownerReferences": [{"kind": "RayCluster", "name": job, "uid": uid, "controller": True}],
            "labels": {"ray.io/cluster": job, "ray.io/node-type": role, "rljob.dev/job": job},
        },
        "spec": {"nodeName": "n1"},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


async def make_ready(api: FakeApi, name: str = "a") -> None:
    """Play KubeRay: pods, then the cluster's status."""
    cluster = api.objects["rayclusters"]["default", name]
    await api.put("pods", ray_pod(f"{name}-head", "head", cluster))
    await api.put("pods", ray_pod(f"{name}-worker", "worker", cluster))
    await api.patch_status("rayclusters", name, ready_cluster(api, name))


async def until(holds: Callable[[], bool], says: Callable[[], Any] = str, seconds: float = 30.0) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"not within {seconds} s: {says()}")


async def hurried(controller: Controller, holds: Callable[[], bool], says: Callable[[], Any] = str) -> None:
    """Wait with the job looked at all the time, instead of when the plan says."""

    def looked() -> bool:
        for key in controller.informers.jobs.jobs():
            controller.queue.add(key)
        return holds()

    await until(looked, says)


class Case:
    """A test's view of the API server, the job and the operator."""

    def __init__(self, api: FakeApi, job: FakeJob) -> None:
        self.api = api
        self.job = job

    def status(self, name: str = "a") -> dict[str, Any]:
        return self.api.objects["rljobs"]["default", name].get("status") or {}

    async def reaches(self, phase: str, name: str = "a", seconds: float = 30.0) -> None:
        await until(lambda: self.status(name).get("phase") == phase, lambda: self.status(name), seconds)

    @asynccontextmanager
    async def operator(self, reconcile: Reconcile, **settings: Any) -> AsyncIterator[Controller]:
        """Run an operator; leave with a graceful stop."""
        chosen = replace(SETTINGS, ray_address=self.job.url, driver_address=self.job.url, **settings)
        controller = Controller(access_to(self.api.url), chosen, reconcile, TIMES)
        running = asyncio.create_task(controller.run())
        try:
            yield controller
        finally:
            controller.stop()
            await asyncio.wait_for(running, 60)


@asynccontextmanager
async def a_case() -> AsyncIterator[Case]:
    async with serving(FakeApi()) as api, serving_job(FakeJob()) as job:
        yield Case(api, job)


async def fetched(controller: Controller, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{controller.port}{path}") as response,
    ):
        return response.status, await response.text()
