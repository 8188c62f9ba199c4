"""Plans of the examples, and changes that are said to help."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from published_models import PARAMETERS, published

from rljob_api import RLJob, derived
from rljob_api.validation import load_manifest
from rljob_worker.errors import UserError
from rljob_worker.models.config import ModelConfig
from rljob_worker.planning.plan import plan_memory
from rljob_worker.planning.remedies import Change, Remedies, find_remedies
from rljob_worker.planning.tables import GIB, MemoryPlan

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen3-4b-grpo-8x910b1.yaml"
MODEL = published("Qwen3-4B")
HARMLESS_FIRST = ["training.maxTokensPerMicroBatch", "training.recompute", "training.optimizer.hostOffload"]


def job(*overrides: str) -> RLJob:
    return load_manifest(EXAMPLE, overrides=list(overrides))


def tried(given: RLJob, model: ModelConfig = MODEL, device_gib: float | None = None) -> tuple[MemoryPlan, Remedies]:
    replan = partial(plan_memory, model=model, device_bytes=device_gib and int(device_gib * GIB))
    plan = replan(given.spec)
    return plan, find_remedies(given, plan, replan)


def changed(given: RLJob, changes: list[Change]) -> RLJob:
    return load_manifest(given.model_dump(mode="json", by_alias=True), overrides=[change.setting for change in changes])


def test_each_change_that_is_enough_alone_makes_it_fit() -> None:
    given = job("spec.training.maxTokensPerMicroBatch=32768")
    plan, remedies = tried(given)
    assert not plan.fits
    assert plan.devices[0].peak.phase == "actor_train"
    fields = [change.field for change in remedies.alone]
    assert [field for field in HARMLESS_FIRST if field in fields] == sorted(
        set(fields) & set(HARMLESS_FIRST), key=HARMLESS_FIRST.index
    )
    assert fields[0] == "training.maxTokensPerMicroBatch"
    for change in remedies.alone:
        assert plan_memory(changed(given, [change]).spec, published("Qwen3-4B")).fits, change


def test_changes_that_are_only_enough_together() -> None:
    given = job()
    _, remedies = tried(given, device_gib=24)
    assert not remedies.alone
    assert len(remedies.together) > 1
    replan = partial(plan_memory, model=published("Qwen3-4B"), device_bytes=24 * GIB)
    assert replan(changed(given, remedies.together).spec).fits
    for change in remedies.together:
        fewer = [other for other in remedies.together if other is not change]
        assert not replan(changed(given, fewer).spec).fits, f"{change} is not needed"


def test_what_nothing_helps_is_said() -> None:
    experts = job("spec.training.tensorParallel=1", "spec.training.expertParallel=2")
    # A plan of all 48 layers takes ten times as long, and all changes are tried.
    few_layers = published("Qwen3-30B-A3B", num_hidden_layers=4)
    plan, remedies = tried(experts, few_layers, device_gib=1)
    assert (remedies.alone, remedies.together) == ([], [])
    assert 0 < remedies.missing <= plan.missing


def test_an_engine_without_room_for_one_sequence_gets_a_larger_fraction() -> None:
    given = job("spec.rollout.memoryFraction=0.12", "spec.training.recompute=Full")
    plan, remedies = tried(given)
    assert plan.engine_short
    assert not plan.devices[0].over
    assert "rollout.memoryFraction" in [change.field for change in remedies.alone]


def test_a_pod_that_is_too_small_gets_its_size() -> None:
    given = job("spec.resources.worker.memory=64Gi", "spec.training.recompute=Full")
    plan, remedies = tried(given)
    assert plan.hosts[0].over
    (change,) = (change for change in remedies.alone if change.field == "resources.worker.memory")
    assert int(change.value.removesuffix("Gi")) == pytest.approx(plan.hosts[0].peak.total / GIB, abs=1)


def test_what_changes_memory_changes_the_plan_the_right_way() -> None:
    def peak(*overrides: str) -> int:
        return plan_memory(job(*overrides).spec, published("Qwen3-4B")).devices[0].peak.total

    base = peak()
    assert peak("spec.training.recompute=Full") < peak("spec.training.recompute=Selective") < base
    assert peak("spec.training.tensorParallel=4") < base
    assert peak("spec.training.optimizer.hostOffload=true") < base
    assert peak("spec.training.maxTokensPerMicroBatch=65536") > base
    assert peak('spec.memorySaver.mode="off"', "spec.training.recompute=Full") > peak("spec.training.recompute=Full")


def test_parameters_that_engines_copy_from_stay_and_leave_no_slots() -> None:
    layout = ["spec.training.tensorParallel=2", "spec.rollout.tensorParallel=2"]
    rows, hosts = [], []
    for transport in ("Auto", "InPlace"):
        plan = plan_memory(job(*layout, f"spec.weightSync.transport={transport}").spec, published("Qwen3-4B"))
        rows.append({row.phase: row.components for row in plan.devices[0].phases})
        hosts.append(plan.hosts[0].phases[0].components)
    apart, shared = rows
    for phase in ("rollout", "rollout_wake_kv"):
        weights = shared[phase]["shared weights"]
        assert weights == shared["actor_train"]["weights"]
        assert shared[phase] == {k: v for k, v in apart[phase].items() if k != "staging slots"} | {
            "shared weights": weights
        }
    trainers = derived.trainers(job(*layout).spec)
    assert hosts[0]["backup"] - hosts[1]["backup"] == trainers * weights
    assert "shared weights" not in shared["actor_train"]


def test_on_the_cpu_they_are_not_moved_away() -> None:
    def asleep(transport: str) -> dict[str, int]:
        given = load_manifest(EXAMPLE.with_name("gsm8k.yaml"), overrides=[f"spec.weightSync.transport={transport}"])
        return plan_memory(given.spec, published("Qwen3-0.6B")).hosts[0].phases[0].components

    apart, shared = asleep("Auto"), asleep("InPlace")
    assert apart["backup"] - shared["backup"] == shared["tensors"] - apart["tensors"] > 0
    assert "staging slots" not in shared


def test_on_cpu_the_gradients_are_there_twice_where_they_are_exchanged() -> None:
    """Gloo copies what it reduces, beside the activations' pages; a rank alone exchanges nothing."""

    def training(devices: int) -> dict[str, int]:
        given = load_manifest(EXAMPLE.with_name("gsm8k.yaml"), overrides=[f"spec.resources.devicesPerNode={devices}"])
        rows = plan_memory(given.spec, published("Qwen3-0.6B")).devices[0].phases
        return next(row.components for row in rows if row.phase == "actor_train")

    alone, two = training(1), training(2)
    assert two["work"] == two["gradients"] == 4 * PARAMETERS["Qwen3-0.6B"]
    assert two["activations"] == pytest.approx(alone["activations"], rel=0.01)
    assert alone["work"] < two["work"] / 2


def test_the_experts_of_a_steps_tokens_are_in_the_nodes_memory() -> None:
    def kept(replay: str) -> int:
        overrides = [
            f"spec.rollout.routerReplay={replay}",
            "spec.rollout.promptsPerStep=32",
            "spec.rollout.samplesPerPrompt=8",
            "spec.rollout.maxResponseTokens=8000",
            "spec.data.maxPromptTokens=192",
        ]
        given = load_manifest(EXAMPLE.with_name("gsm8k.yaml"), overrides=overrides)
        (host,) = plan_memory(given.spec, published("Qwen3-30B-A3B")).hosts
        return host.phases[0].components.get("routed experts", 0)

    assert kept("false") == 0
    assert kept("true") == 256 * 8192 * 48 * 8, "128 experts fit into a byte"


def test_pipeline_stages_have_tables_of_their_own() -> None:
    plan = plan_memory(job("spec.training.pipelineParallel=4").spec, published("Qwen3-4B"))
    assert [table.title.rpartition(" stage ")[2] for table in plan.devices] == ["1 of 4", "2 to 3 of 4", "4 of 4"]
    first, _, last = ({row.phase: row.components for row in table.phases}["actor_train"] for table in plan.devices)
    assert first["activations"] > last["activations"] / 2, "the first stage holds the most micro-batches"
    assert "logits" in last
    assert "logits" not in first


def test_a_layout_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match=r"num_key_value_heads \(8\) is not divisible by tensorParallel \(16\)"):
        plan_memory(
            job("spec.training.tensorParallel=16", "spec.resources.devicesPerNode=16").spec, published("Qwen3-4B")
        )
