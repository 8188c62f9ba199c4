"""Messages about a model for FSDP's jobs before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import ARCHITECTURES
from transformers import AutoModelForCausalLM

from rljob_api.spec import RandomModel, TrainingBackend
from rljob_worker.errors import UserError
from rljob_worker.models import served
from rljob_worker.models.config import SUPPORTED_MODEL_TYPES
from rljob_worker.models.hf_check import check_hf_weights, checkpoint_bytes
from rljob_worker.models.random_model import make_random_model
from rljob_worker.models.trained import checkpoint_tensors, trained_model
from rljob_worker.models.transformers_model import TransformersModel, elements

LLAMA = {key: value for key, value in ARCHITECTURES["llama"].items() if not key.endswith("_token_id")}
BOTH = [name for name, config in ARCHITECTURES.items() if config["model_type"] in SUPPORTED_MODEL_TYPES]


@pytest.mark.parametrize("name", BOTH)
def test_both_backends_see_the_same_checkpoint(name: str) -> None:
    megatron, fsdp = (checkpoint_tensors(trained_model(backend, ARCHITECTURES[name])) for backend in TrainingBackend)
    assert dict(megatron.trained) == dict(fsdp.trained)
    assert megatron.tied == fsdp.tied


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral"])
def test_units_and_root_are_the_whole_model_once(name: str) -> None:
    model = TransformersModel.from_hf(ARCHITECTURES[name])
    assert elements(model.parameters) == elements(tuple(shape for _, shape in model.tensors.trained))
    assert len(model.units) == model.num_layers + (0 if model.tied_embeddings else 2)
    assert checkpoint_bytes(model, "bf16") == checkpoint_bytes(model, "fp32") == 12 * elements(model.parameters)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llamma"}, "model_type 'llamma' is no model that transformers has"),
        ({"model_type": "bert"}, "'bert'.*vLLM has no BertLMHeadModel"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures .* is trained as LlamaForCausalLM"),
        ({"hidden_act": "sillu"}, "transformers builds no model of it: KeyError: 'sillu'"),
        ({"rope_theta": "8"}, "transformers builds no model of it: TypeError"),
    ],
)
def test_what_transformers_or_vllm_does_not_fit_is_refused_by_name(config: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trained_model(TrainingBackend.FSDP, LLAMA | config)


def test_served_architectures_are_read_of_vllms_source() -> None:
    found = served.served_architectures()
    assert {"LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM"} <= found
    assert "LlamaForSequenceClassification" not in found


def written(folder: Path, tokenizer: Path, name: str = "llama", seed: int = 0, **changes: object) -> Path:
    config = {key: value for key, value in ARCHITECTURES[name].items() if not key.endswith("_token_id")}
    make_random_model(RandomModel(config=config | changes, seed=seed), tokenizer, folder)
    return folder


@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "gemma3_text"])
def test_random_model_of_any_architecture(name: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = written(tmp_path / "model", tokenizer_folder, name)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.architectures == [type(model).__name__]
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(0.02, rel=0.1)
    check_hf_weights(folder, trained_model(TrainingBackend.FSDP, folder))


def test_random_model_follows_from_its_seed_alone(tmp_path: Path, tokenizer_folder: Path) -> None:
    torch.manual_seed(5)
    first = load_file(written(tmp_path / "a", tokenizer_folder) / "model.safetensors")
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1)), "the process's own generator is left alone"
    same, other = (
        load_file(written(tmp_path / str(seed), tokenizer_folder, seed=seed) / "model.safetensors") for seed in (0, 1)
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_random_model_with_a_setting_that_its_family_lacks(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(UserError, match="hiden_act: unknown setting of a llama model, did you mean hidden_act"):
        written(tmp_path / "model", tokenizer_folder, hiden_act="silu")


def test_weights_that_do_not_fit_are_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = written(tmp_path / "model", tokenizer_folder)
    model, path = trained_model(TrainingBackend.FSDP, folder), folder / "model.safetensors"
    weights: dict[str, torch.Tensor | None] = dict(load_file(path))
    cases: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({"model.norm.weight": None}, "tensor model.norm.weight is missing"),
        ({"model.norm.weight": torch.ones(3)}, r"model.norm.weight has shape \(3,\); config.json says \(128,\)"),
        ({"model.norm.bias": torch.ones(3)}, "model.norm.bias in .* is not part of this llama model"),
    ]
    for change, message in cases:
        save_file({name: tensor for name, tensor in (weights | change).items() if tensor is not None}, path)
        with pytest.raises(UserError, match=message):
            check_hf_weights(folder, model)
