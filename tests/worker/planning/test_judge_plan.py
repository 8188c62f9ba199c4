"""Plans of jobs that run a judge's model: by turns on all devices, or on devices of its own."""

from __future__ import annotations

from published_models import published
from test_remedies import job

from rljob_worker.planning.plan import plan_memory
from rljob_worker.planning.render import as_json
from rljob_worker.planning.tables import GIB, MemoryPlan

MODEL = "path: /models/score, memoryFraction: 0.25"


def planned(model: str | None, *overrides: str) -> MemoryPlan:
    judged = ["spec.reward={name: judge}", f"spec.judges=[{{name: a, kind: Score, model: {{{model}}}}}]"]
    return plan_memory(job(*(judged if model else ()), *overrides).spec, published("Qwen3-4B"))


def test_on_devices_of_its_own_it_takes_nothing_of_the_others() -> None:
    without, turns, apart = planned(None), planned(MODEL), planned(f"{MODEL}, devicesPerNode: 2")
    shared, alone = apart.devices
    assert shared.phases == without.devices[0].phases
    assert [row.phase for row in turns.devices[0].phases][3:6] == ["judge_wake", "judge", "judge_sleep"]
    assert alone.title == "judge, device: each of its own (2)"
    [row] = alone.phases
    # Without its checkpoint the policy's size is assumed; cache and weights are a quarter of the device.
    assert row.components["judge"] == without.engine.weights * without.job.engine_tp
    assert alone.limit is not None
    assert row.components["judge"] + row.components["judge cache"] == int(0.25 * alone.limit)
    assert as_json(apart, None, None, [])["tables"][1]["peak_phase"] == "judge"  # type: ignore[index,call-overload]


def test_a_node_has_its_processes_and_while_it_never_sleeps_no_copy_of_it() -> None:
    without, turns, apart = planned(None), planned(MODEL), planned(f"{MODEL}, devicesPerNode: 2")
    rows = [plan.hosts[0].peak.components for plan in (without, turns, apart)]
    assert rows[1]["judge"] == 8 * turns.engine.weights * turns.job.engine_tp
    assert "judge" not in rows[2]
    assert [row["processes"] - rows[0]["processes"] for row in rows] == [0, 8 * 4 * GIB, 2 * 4 * GIB]
    assert apart.hosts[0].limit * 8 == without.hosts[0].limit * 10, "a pod has memory for each of its devices"  # type: ignore[operator]


def test_on_cpu_all_of_it_is_in_host_memory() -> None:
    cpu = "spec.resources={profile: cpu, devicesPerNode: 2}"
    without = planned(None, cpu)
    apart = planned(f"{MODEL}, kvCacheBytes: {2**30}, devicesPerNode: 3", cpu)
    [row] = apart.devices[1].phases
    assert apart.devices[0].phases == without.devices[0].phases
    assert apart.hosts[0].peak.components["judge"] == 3 * row.total
    assert apart.hosts[0].limit * 2 == without.hosts[0].limit * 5  # type: ignore[operator]
