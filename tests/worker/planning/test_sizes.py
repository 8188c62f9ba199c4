"""Formulas against published numbers and against the saved tensors of real layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from published_models import PARAMETERS, published
from support import qwen3_5
from support.samples import drawn
from support.warm.protocol import TRAINER
from support.warm.scripts import answer_in, run_text

from rljob_api.spec import Precision, Recompute
from rljob_worker.models.config import ModelConfig
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.planning.activations import layer_bytes
from rljob_worker.planning.engine import kv_bytes_per_token
from rljob_worker.planning.job_shape import JobShape
from rljob_worker.planning.parameters import model_parameters, rank_parameters, training_state

ONE = JobShape("cpu", ParallelLayout(), per_node=1, engine_tp=1)


def trainers(world_size: int, **sizes: int) -> JobShape:
    return replace(ONE, trainers=ParallelLayout(world_size, **sizes))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_that_the_authors_count(name: str) -> None:
    model = published(name)
    assert model_parameters(model) == PARAMETERS[name]
    assert rank_parameters(model, ONE, 0).total == PARAMETERS[name]


def test_ranks_hold_the_model_once_but_for_what_is_replicated() -> None:
    model = published("Qwen3-4B")
    total = PARAMETERS["Qwen3-4B"]
    norms = 36 * (2 * 2560 + 2 * 128) + 2560
    two = rank_parameters(model, trainers(2, tp=2), 0).total
    assert 2 * two == total + norms
    staged = trainers(4, pp=4)
    stages = [rank_parameters(model, staged, stage).total for stage in range(4)]
    assert sum(stages) == total + 151936 * 2560, "the last stage has a copy of the tied embedding"
    assert stages[1] == stages[2] < stages[3]


def test_experts_are_dealt_out() -> None:
    model = published("Qwen3-30B-A3B")
    dealt = trainers(8, ep=8)
    experts = 48 * 128 * 3 * 768 * 2048
    assert rank_parameters(model, dealt, 0).experts == experts // 8
    assert rank_parameters(model, dealt, 0).dense == PARAMETERS["Qwen3-30B-A3B"] - experts


@pytest.mark.parametrize("replicas", [1, 4])
def test_bytes_of_a_parameter_are_those_of_megatrons_own_estimate(replicas: int) -> None:
    parameters = rank_parameters(published("Qwen3-8B"), ONE, 0)
    job = trainers(replicas)
    state = training_state(parameters, job, Precision.BF16)
    each = (state.weights + state.gradients + state.optimizer) / parameters.total
    # megatron/training/theoretical_memory_utils.py: 18 bytes, 6 + 12 / dp with the distributed optimizer.
    assert each == pytest.approx(6 + 12 / replicas)
    state = training_state(parameters, job, Precision.FP32)
    assert (state.weights + state.gradients + state.optimizer) / parameters.total == pytest.approx(8 + 8 / replicas)


def test_kv_cache_of_a_token() -> None:
    assert kv_bytes_per_token(published("Qwen2.5-7B"), 1, 2) == 56 * 1024
    assert kv_bytes_per_token(published("Qwen3-4B"), 1, 2) == 144 * 1024
    assert kv_bytes_per_token(published("Qwen3-4B"), 2, 2) == 72 * 1024
    assert kv_bytes_per_token(published("Qwen3-30B-A3B"), 8, 2) == 48 * 2 * 128 * 2, "each rank keeps one of 4 heads"


def test_tensor_parallelism_leaves_the_residual_stream_and_the_angles_whole() -> None:
    model = replace(published("Qwen3-8B"))
    job = replace(ONE, kind="npu")
    whole = layer_bytes(model, 0, job, Precision.BF16).whole
    cut = layer_bytes(model, 0, replace(trainers(4, tp=4), kind="npu"), Precision.BF16).whole
    uncut = (4 * model.hidden_size + 4 * model.head_dim) * 2
    assert cut - uncut == (whole - uncut) // 4


SAVED = """
import json, sys, torch
torch.set_num_threads(1)
import torch.distributed as dist
from rljob_worker.upstream.install import install
from rljob_worker.upstream.patch import Process
from rljob_worker.models.config import ModelConfig
from rljob_worker.trainer.megatron.models.seeding import seed_cpu
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=0, world_size=1)
install(Process.TRAINER, "cpu", "Megatron")
from megatron.core import parallel_state
parallel_state.initialize_model_parallel()
seed_cpu(1)
from rljob_worker.trainer.megatron.models.build import build_gpt_model
from megatron.core.packed_seq_params import PackedSeqParams
from rljob_worker.trainer.megatron.rows import PositionRotary
LENGTHS = 192, 128, 128, 64
TOKENS = sum(LENGTHS)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])
BOUNDS = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0)
ROW = PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=BOUNDS, cu_seqlens_kv=BOUNDS, max_seqlen_q=192, max_seqlen_kv=192)
def with_layers(config, layers):
    text = config.get("text_config", config)
    text = {**text, "num_hidden_layers": layers}
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:1] * layers
    return {**config, "text_config": text} if "text_config" in config else text
def saved(config, layers, dtype, recompute):
    model = build_gpt_model(
        ModelConfig.from_hf(with_layers(config, layers)),
        tp=1, pp=1, ep=1, dtype=getattr(torch, dtype), recompute=recompute,
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}
    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor
    model.rotary_pos_emb = PositionRotary(model.rotary_pos_emb)
    model.rotary_pos_emb.positions = POSITIONS
    ids = torch.randint(0, 1000, (1, TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, POSITIONS[None], None, packed_seq_params=ROW)
    return sum(nbytes for _, nbytes in kept.values())
result = {}
for name, config in json.loads(sys.argv[1]).items():
    for dtype in ("float32", "bfloat16"):
        for recompute in ("None", "Selective", "Full"):
            few, many = (saved(config, layers, dtype, recompute) for layers in (1, 2))
            result[f"{name} {dtype} {recompute}"] = (many - few) / TOKENS
print(json.dumps(result))
"""
SHAPE = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 48, "linear_value_head_dim": 64}
LAYERS = {
    "qwen2": SHAPE | {"model_type": "qwen2"},
    "qwen3": SHAPE | {"model_type": "qwen3", "head_dim": 64},
    "moe": SHAPE
    | {"model_type": "qwen3_moe", "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 96, "norm_topk_prob": True},
    "linear": qwen3_5.config(**SHAPE, **LINEAR, head_dim=64, layer_types=["linear_attention"] * 2),
    "gated": qwen3_5.config(**SHAPE, **LINEAR, head_dim=64, layer_types=["full_attention"] * 2),
}


@pytest.mark.slow
def test_activations_are_the_saved_tensors_of_real_layers(tmp_path: Path) -> None:
    layers = {name: LAYERS[name] for name in drawn("layers", list(LAYERS), 2)}
    measured = answer_in(run_text(TRAINER, SAVED, tmp_path, json.dumps(layers), tmp_path / "store"))
    planned = {}
    for name, config in layers.items():
        model = ModelConfig.from_hf(config)
        for precision, dtype in ((Precision.FP32, "float32"), (Precision.BF16, "bfloat16")):
            each = layer_bytes(model, 0, ONE, precision)
            # On devices each layer keeps its cosines and sines, of queries and of keys; here all layers share them.
            rotary = 0 if name == "linear" else round(model.head_dim * model.rotary_fraction)
            shared = 4 * rotary * (2 if precision is Precision.BF16 else 4)
            for recompute in Recompute:
                left_out = 0 if recompute is Recompute.FULL else shared
                planned[f"{name} {dtype} {recompute}"] = each.kept(recompute) - left_out
    # What is left out are the norms' and the softmax's statistics and the router.
    assert planned == {case: pytest.approx(nbytes, rel=0.03) for case, nbytes in measured.items()}
