"""Checkpoint folders: what loads, what is refused, and what others make of an exported one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_cases import CONFIGS, WORDS
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rljob_api.spec import RandomModel
from rljob_worker.errors import UserError
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.facts import read_hf_config
from rljob_worker.models.hf_io import load_hf_weights, save_hf_folder
from rljob_worker.models.manifest import hf_manifest
from rljob_worker.models.random_model import make_random_model
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.tensor_slice import Piece
from rljob_worker.trainer.assemble import assemble
from rljob_worker.trainer.megatron.models.convert import local_pieces


def write_model(out: Path, tokenizer_folder: Path, name: str = "qwen3", seed: int = 0, **changes: object) -> Path:
    make_random_model(RandomModel(config=CONFIGS[name] | changes, seed=seed), tokenizer_folder, out)
    return out


@pytest.fixture
def folder(tmp_path: Path, tokenizer_folder: Path) -> Path:
    return write_model(tmp_path / "model", tokenizer_folder)


def megatron_parameters(cfg: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Megatron's names and shapes at tensor parallel size 1, dense, written out by hand."""
    hidden, head = cfg.hidden_size, cfg.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (cfg.vocab_size, hidden)}
    for layer in range(cfg.num_layers):
        prefix = f"decoder.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attention.linear_qkv.weight": ((cfg.num_heads + 2 * cfg.num_query_groups) * head, hidden),
            prefix + "self_attention.linear_proj.weight": (hidden, cfg.num_heads * head),
            prefix + "pre_mlp_layernorm.weight": (hidden,),
            prefix + "mlp.linear_fc1.weight": (2 * cfg.ffn_hidden_size, hidden),
            prefix + "mlp.linear_fc2.weight": (hidden, cfg.ffn_hidden_size),
        }
        if cfg.qk_norm:
            shapes |= {prefix + f"self_attention.{which}_layernorm.weight": (head,) for which in "qk"}
        if cfg.qkv_bias:
            shapes[prefix + "self_attention.linear_qkv.bias"] = ((cfg.num_heads + 2 * cfg.num_query_groups) * head,)
    shapes["decoder.final_layernorm.weight"] = (hidden,)
    if not cfg.tied_embeddings:
        shapes["output_layer.weight"] = (cfg.vocab_size, hidden)
    return {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in shapes.items()}


def pieces_for(folder: Path, dtype: torch.dtype = torch.float32) -> list[Piece]:
    cfg = ModelConfig.from_hf(folder)
    return local_pieces(megatron_parameters(cfg, dtype), cfg, ParallelLayout())


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_through_files_of_bounded_size(
    name: str, dtype: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    source = write_model(tmp_path / "a", tokenizer_folder, name, dtype=dtype)
    cfg = ModelConfig.from_hf(source)
    pieces = pieces_for(source, getattr(torch, dtype))
    load_hf_weights(pieces, source)
    out = tmp_path / "b"
    save_hf_folder(out, assemble(pieces, hf_manifest(cfg)), read_hf_config(source), source, max_file_bytes=60_000)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in out.glob(".part*")] == []
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in files for t in load_file(file).values())
    again = pieces_for(out, getattr(torch, dtype))
    load_hf_weights(again, out)
    expected = load_file(source / "model.safetensors")
    assembled = dict(assemble(again, hf_manifest(cfg)))
    assert set(assembled) == set(expected)
    assert all(torch.equal(assembled[key], expected[key]) for key in expected)
    assert {str(tensor.dtype) for tensor in assembled.values()} == {f"torch.{dtype}"}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "qwen3_5"])
def test_folders_load_in_transformers(name: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = write_model(tmp_path / "model", tokenizer_folder, name)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    stored = load_file(folder / "model.safetensors")
    state = model.state_dict()
    assert torch.equal(
        state["model.layers.1.self_attn.k_proj.weight"], stored["model.layers.1.self_attn.k_proj.weight"]
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("w3 w4").input_ids == [5, 6]
    assert model.config.eos_token_id == tokenizer.eos_token_id == 1


def test_random_model_is_seeded(tmp_path: Path, tokenizer_folder: Path) -> None:
    first, same, other = (
        load_file(write_model(tmp_path / name, tokenizer_folder, seed=seed) / "model.safetensors")
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(torch.equal(first[key], same[key]) for key in first)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert first[name].std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(first["model.norm.weight"], torch.ones(64))


def test_no_random_model_that_sees(tmp_path: Path, tokenizer_folder: Path) -> None:
    config = CONFIGS["qwen3_5"]
    with pytest.raises(UserError, match=r"'qwen3_5' is trained from a checkpoint alone: give model\.path"):
        make_random_model(RandomModel.model_construct(config=config, seed=0), tokenizer_folder, tmp_path)


def test_interrupted_random_model_is_made_again(folder: Path) -> None:
    expected = {key: tensor.clone() for key, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "config.json").unlink()
    (folder / "model.safetensors").write_bytes(b"half")
    (folder / ".part-0").write_bytes(b"half")
    write_model(folder, folder)
    again = load_file(folder / "model.safetensors")
    assert all(torch.equal(again[key], expected[key]) for key in expected)
    assert not (folder / ".part-0").exists()


def test_random_model_takes_the_tokenizers_vocabulary(tmp_path: Path, tokenizer_folder: Path) -> None:
    config = {key: value for key, value in CONFIGS["qwen3"].items() if key != "vocab_size"}
    make_random_model(RandomModel(config=config), tokenizer_folder, tmp_path / "model")
    assert ModelConfig.from_hf(tmp_path / "model").vocab_size == len(WORDS)
    with pytest.raises(ValueError, match="vocab_size 10 is smaller than the tokenizer's 62"):
        make_random_model(RandomModel(config=config | {"vocab_size": 10}), tokenizer_folder, tmp_path / "small")


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; `__` stands for a dot."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for key, tensor in tensors.items():
        name = key.replace("__", ".")
        if tensor is None:
            del stored[name]
        else:
            stored[name] = tensor
    path.unlink()
    save_file(stored, path)


def refused(folder: Path, message: str) -> None:
    """Loading raises `message` and leaves the parameters as they were."""
    pieces = pieces_for(folder)
    with pytest.raises(ValueError, match=message):
        load_hf_weights(pieces, folder)
    assert all(bool(piece.read().isnan().all()) for piece in pieces)


def test_missing_tensor(folder: Path) -> None:
    change(folder, model__layers__1__self_attn__q_norm__weight=None)
    refused(folder, r"model: tensor model\.layers\.1\.self_attn\.q_norm\.weight is missing")


def test_extra_tensor(folder: Path) -> None:
    change(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(128))
    refused(folder, r"tensor model\.layers\.0\.self_attn\.q_proj\.bias in model\.safetensors is not part of this qwen3")


def test_wrong_shape(folder: Path) -> None:
    change(folder, model__norm__weight=torch.ones(63))
    refused(folder, r"model\.safetensors: tensor model\.norm\.weight has shape \(63,\), expected \(64,\)")


def test_tied_model_may_store_an_equal_head_only(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = write_model(tmp_path / "model", tokenizer_folder, "qwen3_tied")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, lm_head__weight=embedding.clone())
    load_hf_weights(pieces_for(folder), folder)
    change(folder, lm_head__weight=embedding + 1)
    refused(folder, r"lm_head\.weight differs from model\.embed_tokens\.weight")


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, r"model: no weights; expected model\.safetensors")


def test_broken_files(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}')
    refused(folder, r"model-00001-of-00002\.safetensors: no such file")
    index.write_text('{"weight_map": {"model.gone.weight": "model.safetensors"}}')
    refused(folder, r"tensor model\.gone\.weight is missing, but model\.safetensors\.index\.json lists it")
    index.write_text("[]")
    refused(folder, "not a safetensors index")
    index.unlink()
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    refused(folder, r"model\.safetensors: not a readable safetensors file")


def test_export_refuses_a_folder_with_weights_or_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds weights already"):
        save_hf_folder(folder, [("a", torch.ones(1))], read_hf_config(folder), folder)
    with pytest.raises(ValueError, match="no tokenizer"):
        save_hf_folder(tmp_path / "new", [("a", torch.ones(1))], read_hf_config(folder), tmp_path)


def test_reading_is_a_view_and_moved_parameters_are_noticed(folder: Path) -> None:
    cfg = ModelConfig.from_hf(folder)
    parameters = megatron_parameters(cfg)
    pieces = {piece.hf_name: piece for piece in local_pieces(parameters, cfg, ParallelLayout())}
    fused = parameters["decoder.layers.0.mlp.linear_fc1.weight"]
    up = pieces["model.layers.0.mlp.up_proj.weight"]
    assert up.read().data_ptr() == fused[cfg.ffn_hidden_size].data_ptr()
    fused.fill_(3)
    assert bool((up.read() == 3).all())
    with pytest.raises(ValueError, match=r"takes a shard of shape \(128, 64\), got \(64, 128\)"):
        up.write(torch.zeros(64, 128))
    fused.data = fused.clone()
    with pytest.raises(RuntimeError, match=r"decoder\.layers\.0\.mlp\.linear_fc1\.weight has moved"):
        up.read()
