"""Plans of jobs whose engines capture graphs, which stay on the device while an engine sleeps."""

from __future__ import annotations

import pytest
from published_models import published
from test_remedies import job

from rljob_worker.planning.engine import GRAPH_BYTES
from rljob_worker.planning.plan import plan_memory
from rljob_worker.planning.tables import GIB, MemoryPlan

SIZES = 6
"""1 to 32 sequences, by powers of two."""


def planned(graphs: bool, *settings: str) -> MemoryPlan:
    own = [f"spec.rollout.graphMode={str(graphs).lower()}", "spec.rollout.maxNumSeqs=32"]
    return plan_memory(job(*own, *settings).spec, published("Qwen3-4B"), device_bytes=64 * GIB)


@pytest.mark.parametrize("profile", ["ascend-a2", "cuda"])
def test_graphs_are_there_in_every_phase(profile: str) -> None:
    settings = f"spec.resources.profile={profile}", "spec.rollout.kvCacheBytes=1073741824"
    without, captured = planned(False, *settings), planned(True, *settings)
    for before, after in zip(without.devices[0].phases, captured.devices[0].phases, strict=True):
        assert after.components == before.components | {"graphs": SIZES * GRAPH_BYTES}


def test_vllm_takes_them_off_the_cache_on_gpus_alone() -> None:
    for profile, less in (("ascend-a2", 0), ("cuda", SIZES * GRAPH_BYTES)):
        settings = f"spec.resources.profile={profile}", "spec.rollout.memoryFraction=0.5"
        sizes = [
            planned(graphs, *settings, "spec.rollout.kvCacheBytes=null").engine.kv_cache for graphs in (False, True)
        ]
        assert sizes[0] - sizes[1] == less


def test_engines_on_devices_of_their_own_have_them_alone() -> None:
    sides = "trainer: {devicesPerNode: 4}, rollout: {devicesPerNode: 4}"
    apart = f"spec.resources={{profile: ascend-a2, {sides}}}"
    trainers, engines = planned(True, "spec.mode=Disaggregated", apart).devices
    assert not any("graphs" in phase.components for phase in trainers.phases)
    assert all(phase.components["graphs"] == SIZES * GRAPH_BYTES for phase in engines.phases)


def test_a_cpu_captures_none() -> None:
    cpu = "spec.resources={profile: cpu, devicesPerNode: 2}"
    assert planned(True, cpu).devices == planned(False, cpu).devices
