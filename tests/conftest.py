"""Shared set-up: fast tests first, no network, no compilation, no usage statistics."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from support.lanes import Lanes, Seconds, give_way
from support.places import Places
from support.samples import SEED
from support.warm.client import share_server

if TYPE_CHECKING:
    from xdist.scheduler import Scheduling

# Until all tests are collected.
gc.disable()
# Hundreds of interpreters are started: where a machine's variables forbid bytecode, each would compile all it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Three processes on two cores: threads of a computation would wait for one another, and each burns a core meanwhile.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# OpenMP's threads wait for one another by spinning: where more of them than cores have work, nearly all of the time. A
# training step of the quickstart with two threads takes 3 s then, and 0.2 s where they sleep after some microseconds.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# In some tests the members of a process group are threads. Two that enqueue at once end the process: torch's flight
# recorder (2.11) writes a map of its own without the lock.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
# Three lanes on two cores: Ray's own waits for its own processes are shorter than what a start may take then.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
os.environ.setdefault("RAY_DASHBOARD_STARTUP_TIMEOUT_S", "120")
os.environ.setdefault("RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT", "120")
os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")
# A busy machine is no fault of an example that waited for it.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_report_header() -> str:
    """The seed is drawn when it is imported here, before there are other processes."""
    return f"RLJOB_SEED={SEED}"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Seconds())
    process = getattr(config, "workerinput", None)
    give_way(process)
    if process is not None:
        config.pluginmanager.register(Places())
    elif config.getoption("numprocesses", None):
        share_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of fast tests, then those that start Ray or vLLM, need a Kubernetes control plane, need a real node."""
    markers = ("node", "cluster", "slow")
    ranks: dict[Path, list[bool]] = {}
    for item in items:
        marked = {mark.name for mark in item.iter_markers()}
        rank = [marker in marked for marker in markers]
        ranks[item.path] = max(rank, ranks.get(item.path, rank))
    items.sort(key=lambda item: ranks[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Tests and what they import are a million objects, which the collector need not read again and again."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Else what the interpreter should free last, with a thread in it, is left: the process would end by SIGABRT."""
    gc.unfreeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Lanes(config, log)
