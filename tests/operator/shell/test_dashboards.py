"""Every query of the chart's dashboards on a real Prometheus that scrapes a whole operator: each returns data.

The operator reads step records of a real run; of its kind alone is that it has no lanes, which are added.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from dashboard_queries import dashboard_queries
from operator_cases import Case, a_case, hurried, make_ready, manifest, until
from real_records import real_records, record_after
from support.ports import free_port

from rljob_operator.shell.jobs.controller import Controller
from rljob_operator.state.reconcile import reconcile

HOURS = "rljob:phase_seconds:"
"""Recorded series look hours back; the rules' own tests are in tests/operator/metrics/rules."""
ELASTIC = "rljob_engine_nodes"
"""Metric of jobs whose number of nodes may change, which the job here is not: `test_exposition.py` has one."""

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Prometheus (Debian package prometheus)"
)


def queries() -> dict[str, str]:
    """Query by the panel that shows it."""
    asked = dashboard_queries("default", "a", "30s")
    return {where: query for where, query in asked.items() if HOURS not in query and ELASTIC not in query}


@asynccontextmanager
async def prometheus(folder: Path, target: int) -> AsyncIterator[str]:
    """A real one that scrapes a port of this host every second; yields its address."""
    scrape = {"job_name": "rljob", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
    times = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"global": times, "scrape_configs": [scrape]}))
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stderr=(folder / "prometheus.log").open("wb"),
    )
    try:
        await _answers(f"http://127.0.0.1:{port}/-/ready")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 60)


async def _answers(address: str) -> None:
    async with asyncio.timeout(120), aiohttp.ClientSession() as session:
        while True:
            with suppress(aiohttp.ClientConnectionError):
                async with session.get(address) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)


async def empty(session: aiohttp.ClientSession, address: str, asked: dict[str, str]) -> dict[str, str]:
    """Queries that return nothing, or nothing but NaN."""
    without = {}
    for where, query in asked.items():
        async with session.get(f"{address}/api/v1/query", params={"query": query}) as response:
            answer = await response.json()
        assert answer["status"] == "success", f"{where}: {query}: {answer}"
        if not any(series["value"][1] != "NaN" for series in answer["data"]["result"]):
            without[where] = query
    return without


async def to_running(case: Case, **spec: Any) -> None:
    await case.api.put("rljobs", manifest(failurePolicy={"backoffSeconds": 1}, **spec))
    await until(lambda: ("default", "a") in case.api.objects.get("rayclusters", {}), case.status)
    await make_ready(case.api)
    await case.reaches("Running")


def test_every_query_returns_data(tmp_path: Path) -> None:
    async def steps(case: Case, controller: Controller, session: aiohttp.ClientSession) -> None:
        async with prometheus(tmp_path, controller.port) as address:
            left, restarts = queries(), {"rljob-fleet: Restarts A", "rljob-job: Restarts and lost work A"}
            async with asyncio.timeout(180):
                for record in itertools.cycle(real_records()):
                    if not left.keys() - restarts:
                        break
                    lanes = {"engine": {"rollout": 1.5, "env_wait": 0.25, "admission_wait": 0.5}}
                    case.job.records.append({**record_after(case.job.records, record), "lanes": lanes})
                    controller.queue.add(next(controller.informers.jobs.jobs()))
                    await asyncio.sleep(0.5)
                    left = await empty(session, address, left)
            # Where nothing was restarted those two are empty.
            assert left.keys() == restarts
            case.job.end("FAILED", 1)
            await hurried(controller, lambda: case.status().get("restarts") == 1, case.status)
            async with asyncio.timeout(120):
                while left := await empty(session, address, left):
                    await asyncio.sleep(0.5)

    async def run() -> None:
        async with a_case() as case, case.operator(reconcile) as controller, aiohttp.ClientSession() as session:
            await to_running(case)
            await steps(case, controller, session)

    asyncio.run(run())
