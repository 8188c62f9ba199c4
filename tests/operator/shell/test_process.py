"""`rljob-operator` as a process: what Kopf does around the operator's own parts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
import yaml
from fake_api import FakeApi, serving
from support.ports import free_port

NAMELESS = """
import pwd, runpy, sys

def nobody(uid):
    raise KeyError(f"uid not found: {uid}")

pwd.getpwuid = nobody
sys.argv = ["rljob-operator"]
runpy.run_module("rljob_operator.main", run_name="__main__")
"""
"""The operator as a user that the system has no name for, as in its pod."""


async def started(api: FakeApi, folder: Path, **variables: str) -> asyncio.subprocess.Process:
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": api.url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    (folder / "config").write_text(yaml.safe_dump(config))
    unnamed = {
        name: value for name, value in os.environ.items() if name not in ("LOGNAME", "USER", "LNAME", "USERNAME")
    }
    named = {f"RLJOB_{name.upper()}": value for name, value in variables.items()}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        NAMELESS,
        env={**unnamed, "KUBECONFIG": str(folder / "config"), "RLJOB_HTTP_HOST": "127.0.0.1", **named},
        stderr=asyncio.subprocess.PIPE,
    )


async def answers(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    async with asyncio.timeout(120), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://{host}:{port}{path}") as response:
                    if response.status != 503:
                        return response.status, await response.text()
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("number", "host"), [(signal.SIGTERM, "127.0.0.1"), (signal.SIGINT, "::1")])
def test_it_serves_leads_answers_the_kubelet_and_ends_with_the_lease_given_back(
    tmp_path: Path, number: signal.Signals, host: str
) -> None:
    async def run() -> None:
        async with serving(FakeApi()) as api:
            http, probe = free_port(), free_port()
            ports = {"http_port": str(http), "probe_port": str(probe)}
            process = await started(api, tmp_path, **ports, probe_host=host, identity="me")
            try:
                assert await answers(http, "/readyz") == (200, "ok\n")
                assert await answers(probe, "/healthz", f"[{host}]" if ":" in host else host) == (
                    200,
                    '{"watches": "ok"}',
                )

                def holder() -> str:
                    item = api.objects.get("leases", {}).get(("rljob-system", "rljob-operator"))
                    return str(item["spec"]["holderIdentity"]) if item else ""

                async with asyncio.timeout(120):
                    while holder() != "me":
                        await asyncio.sleep(0.05)
                process.send_signal(number)
                async with asyncio.timeout(120):
                    assert await process.wait() == 0
                assert holder() == ""
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    asyncio.run(run())


def test_a_port_that_is_taken_ends_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(FakeApi()) as api:
            taken = int(api.url.rpartition(":")[2])
            process = await started(api, tmp_path, http_port=str(taken))
            _, said = await asyncio.wait_for(process.communicate(), 120)
            assert process.returncode == 1
            assert b"address already in use" in said

    asyncio.run(run())
