"""The plan of FSDP's ranks against what real ones have: rows, and the tensors that autograd saved."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from published_models import CONFIGS, PARAMETERS
from support.architectures import ARCHITECTURES, BASE
from support.brought import Brought
from torch import Tensor, nn

from rljob_api.spec import KlSpec, LoraSpec, RLJobSpec
from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.errors import UserError
from rljob_worker.models.adapters import add_adapters
from rljob_worker.models.hf_model import build_hf_model
from rljob_worker.models.transformers_model import TransformersModel, elements
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.planning.fsdp import fsdp_forward_pass, fsdp_state, fsdp_training_pass, saved_bytes
from rljob_worker.planning.job_shape import JobShape, job_shape, largest_micro_batch
from rljob_worker.planning.memory import handed_over
from rljob_worker.planning.plan import plan_memory
from rljob_worker.trainer import state_buckets
from rljob_worker.trainer.fsdp.attention import register_packed_attention
from rljob_worker.trainer.fsdp.optimizer import ShardedAdamW
from rljob_worker.trainer.fsdp.pieces import rows_of

ONE = JobShape("cpu", ParallelLayout(), per_node=1, engine_tp=1)
LONGEST = 24
LENGTHS = (LONGEST, LONGEST, 8)
TOKENS, RESPONSES = sum(LENGTHS), 20


def spec_of(**training: Any) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "steps": 1,
            "model": {"random": {"config": {}}},
            "data": {"synthetic": {}},
            "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 16},
            "training": {"backend": "FSDP", "precision": "fp32", **training},
            "resources": {"profile": "cpu", "devicesPerNode": 2},
        }
    )


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama_tied", "mixtral"])
def test_rows_are_those_that_the_first_rank_has(name: str, shards: int) -> None:
    model = TransformersModel.from_hf(ARCHITECTURES[name])
    layout = ParallelLayout(shards, shards=shards)
    held = sum(
        len(rows_of(p.shape[0], layout)) * p[0].numel() for p in build_hf_model(ARCHITECTURES[name]).parameters()
    )
    state = fsdp_state(spec_of(), model, replace(ONE, trainers=layout))
    assert (state.weights, state.optimizer, state.gradients) == (4 * held, 8 * held, 0)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("bucket", [1000, 5000, 10**6])
def test_an_offloaded_state_takes_two_buckets_of_the_device(
    bucket: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_buckets, "BUCKET_ELEMENTS", bucket)
    layout = ParallelLayout(shards, shards=shards)
    model = build_hf_model(ARCHITECTURES["llama_tied"])
    rows = {n: torch.zeros(len(rows_of(p.shape[0], layout)), *p.shape[1:]) for n, p in model.named_parameters()}
    spec = spec_of()
    state = ShardedAdamW(rows, spec.training.optimizer, nullcontext, overlap=CpuDevice().overlap)
    with Brought() as brought:
        state.step(rows, 1e-3)
    planned = fsdp_state(spec, TransformersModel.from_hf(ARCHITECTURES["llama_tied"]), replace(ONE, trainers=layout))
    # Beside a number of updates for each parameter.
    assert 0.5 * planned.on_device < brought.peak <= planned.on_device + 4 * len(rows)
    assert (planned.on_device == planned.optimizer) == (bucket == 10**6)


class Echo(dist.ProcessGroup):
    """The first of some ranks, the others of which have the same tokens: it gets what it gives."""

    def alltoall_base(self, received: Tensor, given: Tensor, *_: object) -> None:
        received.copy_(given)


def saved_by_a_real_model(
    config: dict[str, Any], dtype: torch.dtype, lora: LoraSpec | None = None, ranks: int = 1
) -> tuple[list[int], int]:
    """Bytes that each layer keeps for the backward pass, and all of them."""
    model = build_hf_model(config, attention=register_packed_attention())
    if lora is None:
        model.to(dtype)
    else:
        add_adapters(model, lora, dtype, "x")
    model._apply(lambda p: torch.randn(p.shape, dtype=p.dtype) * 0.02 if p.is_meta else p)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}
    marks: list[int] = []

    def total() -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    def mark(_layer: nn.Module, *_: object) -> None:
        marks.append(total())

    for layer in model.get_decoder().layers:
        layer.register_forward_pre_hook(mark)
        layer.register_forward_hook(mark)

    def select(_head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0][:, torch.arange(RESPONSES)], *args[1:])

    model.get_output_embeddings().register_forward_pre_hook(select)
    count = TOKENS // ranks
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None, :count]
    context: dict[str, Any] = {"context_group": Echo(0, ranks)} if ranks > 1 else {}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        bounds = list(accumulate(LENGTHS, initial=0))
        ids = torch.randint(0, 60, (1, count))
        model(input_ids=ids, position_ids=positions, use_cache=False, row_bounds=bounds, **context)
    return [after - before for before, after in zip(marks[::2], marks[1::2])], total()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2"])
def test_activations_are_the_saved_tensors_of_a_real_pass(name: str, dtype: torch.dtype) -> None:
    config = ARCHITECTURES[name]
    layers, total = saved_by_a_real_model(config, dtype)
    planned = saved_bytes(TransformersModel.from_hf(config).config, TOKENS, LONGEST, RESPONSES, dtype.itemsize)
    assert list(planned.layers) == pytest.approx(layers, rel=0.03)
    assert planned.outside + sum(planned.layers) == pytest.approx(total, rel=0.03)
    assert planned.input == TOKENS * 128 * dtype.itemsize


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_activations_of_ranks_that_divide_a_row_are_those_of_a_real_pass(name: str) -> None:
    """Scores are of all tokens for a share of the heads, and masks whole on each rank."""
    config = ARCHITECTURES[name]
    layers, total = saved_by_a_real_model(config, torch.float32, ranks=2)
    model = TransformersModel.from_hf(config)
    planned = saved_bytes(model.config, TOKENS // 2, LONGEST, RESPONSES, 4, ranks=2)
    assert list(planned.layers) == pytest.approx(layers, rel=0.03)
    assert planned.outside + sum(planned.layers) == pytest.approx(total, rel=0.03)
    whole = saved_bytes(model.config, TOKENS, LONGEST, RESPONSES, 4)
    assert all(2 * own >= of_all for own, of_all in zip(planned.layers, whole.layers, strict=True))


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (ARCHITECTURES["llama"] | DYNAMIC, "a rope that follows the longest sample"),
        (BASE | {"model_type": "stablelm"}, "attention that transformers computes in a way of its own"),
        (CONFIGS["Qwen3-VL-8B-Instruct"], "pictures"),
        (ARCHITECTURES["llama"] | {"num_key_value_heads": 1}, r"num_key_value_heads .* by contextParallel \(2\)"),
    ],
)
def test_rows_that_ranks_cannot_divide_are_refused(config: dict[str, Any], why: str) -> None:
    model = TransformersModel.from_hf(config)
    job_shape(spec_of(), model)
    with pytest.raises(UserError, match=why):
        job_shape(spec_of(contextParallel=2), model)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("algorithm.distill.teacher", {"algorithm": {"name": "distill", "distill": {"teacher": {"path": ""}}}}),
        ("critic.model", {"algorithm": {"name": "ppo"}, "critic": {"model": {"path": ""}}}),
    ],
)
def test_so_are_those_of_a_teacher_and_a_critic(field: str, given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ARCHITECTURES["llama"] | DYNAMIC))
    document = spec_of(contextParallel=2).model_dump(mode="json", by_alias=True, exclude_unset=True)
    spec = RLJobSpec.model_validate(document | json.loads(json.dumps(given).replace('""', json.dumps(str(tmp_path)))))
    with pytest.raises(UserError, match=rf"spec\.{field}\.path: of .* follows the longest sample"):
        plan_memory(spec, TransformersModel.from_hf(ARCHITECTURES["llama"]))


def test_adapters_are_planned_as_real_ones_are() -> None:
    """Weights in the format of computation, adapters and their moments; no reference, for that is without adapters."""
    model = TransformersModel.from_hf(ARCHITECTURES["llama"])
    lora = {"rank": 4, "targets": ["q_proj", "down_proj"]}
    spec = spec_of(precision="bf16", lora=lora)
    plan = plan_memory(spec, model)
    built = build_hf_model(ARCHITECTURES["llama"])
    add_adapters(built, LoraSpec.model_validate(lora), torch.bfloat16, "x")
    layout = ParallelLayout(2, shards=2)
    held = {
        trained: sum(
            len(rows_of(p.shape[0], layout)) * p[0].numel() * p.element_size()
            for p in built.parameters()
            if p.requires_grad == trained
        )
        for trained in (True, False)
    }
    rows = {phase.phase: phase.components for phase in plan.devices[0].phases}
    assert rows["wake_up"]["weights"] == held[True] + held[False]
    assert rows["wake_up"]["optimizer"] == 2 * held[True]
    assert rows["actor_train"]["gradients"] == held[True]
    assert rows["update_weights"]["merged"] > 0
    assert "merged" not in rows["actor_train"]
    full = plan_memory(spec_of(precision="bf16"), model)
    assert [table.peak.total for table in plan.devices] < [table.peak.total for table in full.devices]
    kl = spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update={"kl": KlSpec(coefficient=0.1)})})
    assert not any("reference" in phase.components for phase in plan_memory(kl, model).hosts[0].phases)


def apart(lora: dict[str, Any]) -> RLJobSpec:
    resources = {"profile": "cpu", "trainer": {"devicesPerNode": 2}, "rollout": {"devicesPerNode": 1}}
    given = spec_of().model_dump(mode="json", by_alias=True, exclude_none=True)
    training = {"backend": "FSDP", "lora": lora}
    return RLJobSpec.model_validate(given | {"mode": "Async", "resources": resources, "training": training})


def test_adapters_alone_are_a_hundredth_of_what_engines_get() -> None:
    model = TransformersModel.from_hf(CONFIGS["Qwen3-4B"])
    of_adapters, of_model = (
        sum(elements((shape,)) for _, shape in handed_over(apart({"rank": 16, "handover": handover}), model))
        for handover in ("Adapters", "Merged")
    )
    assert of_model == PARAMETERS["Qwen3-4B"]
    assert 0.005 < of_adapters / of_model <= 0.01


def test_adapters_alone_are_in_the_engine_and_not_merged() -> None:
    model = TransformersModel.from_hf(ARCHITECTURES["llama"])
    alone, merged = (plan_memory(apart({"rank": 8, "handover": which}), model) for which in ("Adapters", "Merged"))
    assert merged.handed_over == merged.of_model
    assert alone.engine.weights == merged.engine.weights + alone.handed_over
    rows = [{phase.phase: phase.components for phase in plan.devices[0].phases} for plan in (alone, merged)]
    assert ["merged" in phases["update_weights"] for phases in rows] == [False, True]


def test_activations_with_adapters_are_the_saved_tensors_of_a_real_pass() -> None:
    lora = LoraSpec(rank=4)
    layers, total = saved_by_a_real_model(ARCHITECTURES["llama"], torch.bfloat16, lora)
    config = TransformersModel.from_hf(ARCHITECTURES["llama"]).config
    planned = saved_bytes(config, TOKENS, LONGEST, RESPONSES, 2, lora.model_dump_json(by_alias=True))
    assert list(planned.layers) == pytest.approx(layers, rel=0.03)
    assert planned.outside + sum(planned.layers) == pytest.approx(total, rel=0.03)


def test_what_is_gathered_and_what_recomputation_saves() -> None:
    model = TransformersModel.from_hf(ARCHITECTURES["llama"])
    layer = elements(model.units[0])
    root = elements(model.root)
    bf16 = spec_of(precision="bf16")
    job = job_shape(bf16, model)
    batch = largest_micro_batch(bf16, model, job)
    assert fsdp_forward_pass(bf16, model, job, batch).gathered == 2 * (2 * layer + root)
    kept = spec_of(precision="bf16", fsdp={"reshardAfterForward": False})
    assert fsdp_training_pass(kept, model, job, batch).gathered == 2 * elements(model.parameters)
    whole, again = (
        fsdp_training_pass(spec_of(recompute=kind), model, job, batch).activations for kind in ("None", "Full")
    )
    assert again < whole


def test_a_plan_has_gradients_and_gathered_layers_in_training_alone() -> None:
    model = TransformersModel.from_hf(ARCHITECTURES["llama"])
    plan = plan_memory(spec_of(), model)
    rows = {phase.phase: phase.components for phase in plan.devices[0].phases}
    weights = fsdp_state(spec_of(), model, plan.job).weights
    assert rows["actor_train"]["gradients"] == rows["actor_train"]["weights"] == weights
    assert "gradients" not in rows["wake_up"]
    assert "gathered" not in rows["wake_up"]
    assert rows["wake_up"]["optimizer"] == 2 * weights
