"""The plan of a training step against the memory that a real one takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peak_memory import EQUAL, LENGTHS, PROMPT, RANKS, SPEC, WITH_FSDP
from safetensors.torch import save_file
from support.samples import drawn
from support.warm.protocol import TRAINER
from support.warm.scripts import answer_in, run_script

from rljob_api.spec import RLJobSpec
from rljob_worker.algorithms import output_layer
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.manifest import hf_manifest
from rljob_worker.models.transformers_model import TransformersModel
from rljob_worker.planning.activations import training_pass
from rljob_worker.planning.fsdp import fsdp_training_pass
from rljob_worker.planning.job_shape import MicroBatch, job_shape
from rljob_worker.planning.parameters import rank_parameters

pytestmark = pytest.mark.slow

MIB = 2**20
CONFIG = {"model_type": "qwen3", "vocab_size": 16384, "hidden_size": 256, "intermediate_size": 640}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
CONFIG |= {"max_position_embeddings": 1024, "tie_word_embeddings": False}
KEPT_AND_BLOCK = {"all logits": (512 * MIB, 64 * MIB), "a fifth of them": (24 * MIB, 8 * MIB)}
"""Bytes that are kept, and of a block."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peak")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = hf_manifest(ModelConfig.from_hf(folder))
    save_file(
        {n: torch.ones(s) if len(s) == 1 else torch.randn(s) * 0.02 for n, s in shapes}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("kept_logits", drawn("logits", list(KEPT_AND_BLOCK)))
def test_a_step_takes_what_is_planned(
    kept_logits: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, block = KEPT_AND_BLOCK[kept_logits]
    script = Path(__file__).with_name("peak_memory.py")
    (output,) = run_script(TRAINER, script, [model, tmp_path / "store", kept, block])
    measured = answer_in(output)
    assert measured["micro_batches"] == 1
    monkeypatch.setitem(output_layer.KEPT_BYTES, "cpu", kept)
    monkeypatch.setitem(output_layer.BLOCK_BYTES, "cpu", block)
    spec, config = RLJobSpec.model_validate(SPEC), ModelConfig.from_hf(model)
    responses = sum(LENGTHS) - PROMPT * len(LENGTHS)
    batch = MicroBatch(sum(LENGTHS), responses, 1, max(LENGTHS), assumed_prompt=False)
    job = job_shape(spec, config)
    planned = training_pass(spec, config, job, 0, batch, rank_parameters(config, job, 0).largest)
    assert (planned.logits < responses * 16384 * 4) == (kept < 100 * MIB)
    assert planned.activations + planned.logits + planned.work == pytest.approx(measured["peak"], rel=0.15)


@pytest.mark.parametrize("kept_logits", drawn("logits with FSDP", list(KEPT_AND_BLOCK)))
def test_a_step_of_fsdp_takes_what_is_planned(
    kept_logits: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the rows and moments that stay: gathered layers, gradients, activations, logits."""
    kept, block = KEPT_AND_BLOCK[kept_logits]
    script, store = Path(__file__).with_name("peak_memory.py"), tmp_path / "store"
    outputs = run_script(TRAINER, script, *([model, store, kept, block, rank] for rank in range(RANKS)))
    monkeypatch.setitem(output_layer.KEPT_BYTES, "cpu", kept)
    monkeypatch.setitem(output_layer.BLOCK_BYTES, "cpu", block)
    spec, whole = RLJobSpec.model_validate(WITH_FSDP), TransformersModel.from_hf(model)
    responses = sum(EQUAL) - PROMPT * len(EQUAL)
    batch = MicroBatch(sum(EQUAL), responses, 1, max(EQUAL), assumed_prompt=False)
    planned = fsdp_training_pass(spec, whole, job_shape(spec, whole), batch)
    total = planned.activations + planned.logits + planned.work + planned.gathered + planned.gradients
    for measured in map(answer_in, outputs):
        assert measured["micro_batches"] == 1
        # What is gathered, and a layer's gradients, are not there with all else where logits come in blocks.
        assert 0.5 * total < measured["peak"] < 1.1 * total, (measured, planned)
