"""Megatron's groups that a training step uses, recorded from real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_groups import LAYOUTS
from safetensors.torch import save_file
from support.samples import drawn
from support.warm.protocol import TRAINER
from support.warm.scripts import run_script

from rljob_api.spec import RLJobSpec
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.manifest import hf_manifest
from rljob_worker.planning.communicators import trainer_groups
from rljob_worker.planning.job_shape import job_shape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHAPE = {"vocab_size": 31, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "dense": SHAPE | {"model_type": "qwen3", "tie_word_embeddings": False},
    "tied": SHAPE | {"model_type": "qwen3", "tie_word_embeddings": True},
    "moe": SHAPE
    | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"tie_word_embeddings": False, "norm_topk_prob": True},
}
DRAWN = drawn("groups of a step", list(LAYOUTS), 3)
SCRIPT = Path(__file__).with_name("recorded_groups.py")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Case -> groups that either rank used."""
    folder = tmp_path_factory.mktemp("groups")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        shapes = hf_manifest(ModelConfig.from_hf(folder / name))
        save_file({n: torch.ones(shape) * 0.02 for n, shape in shapes}, folder / name / "model.safetensors")
    run_script(TRAINER, SCRIPT, *([rank, folder, *DRAWN] for rank in range(2)))
    both = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return {case: sorted({name for one in both for name in one[case]}) for case in DRAWN}


@pytest.mark.parametrize("case", DRAWN)
def test_groups_of_a_step(recorded: dict[str, list[str]], case: str) -> None:
    model, training = LAYOUTS[case]
    spec = RLJobSpec.model_validate(
        {
            "steps": 1,
            "model": {"random": {"config": {}}},
            "data": {"synthetic": {}},
            "rollout": {"promptsPerStep": 2, "samplesPerPrompt": 4, "maxResponseTokens": 4},
            "training": training,
            "resources": {"profile": "cpu", "devicesPerNode": 2},
        }
    )
    config = ModelConfig.from_hf(MODELS[model])
    assert recorded[case] == sorted(trainer_groups(config, job_shape(spec, config)))
