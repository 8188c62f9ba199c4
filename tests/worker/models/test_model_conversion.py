"""Megatron against transformers: logits, and the way back to the checkpoint's bytes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from model_cases import CASES, CONFIGS, vocabulary
from safetensors.torch import load_file

from rljob_worker.models.config import ModelConfig
from rljob_worker.models.manifest import hf_manifest
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.tensor_slice import Piece
from rljob_worker.trainer.assemble import assemble
from rljob_worker.trainer.megatron.models.convert import local_pieces

pytestmark = pytest.mark.slow
every_case = pytest.mark.parametrize(("model", "layout"), CASES, ids=[f"{model}-{layout}" for model, layout in CASES])


def shard(results: Path, model: str, layout: str, rank: int) -> tuple[dict[str, torch.Tensor], ParallelLayout]:
    saved = torch.load(results / f"{model}-{layout}.rank-{rank}.pt", weights_only=False)
    return saved["parameters"], saved["layout"]


def pieces_of_rank(results: Path, folder: Path, model: str, layout: str, rank: int) -> list[Piece]:
    parameters, parallel = shard(results, model, layout, rank)
    return local_pieces(parameters, ModelConfig.from_hf(folder), parallel)


def all_pieces(results: Path, folder: Path, model: str, layout: str) -> list[Piece]:
    return [piece for rank in range(2) for piece in pieces_of_rank(results, folder, model, layout, rank)]


def trained_tensors(folder: Path, cfg: ModelConfig) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(cfg.untrained)}


@every_case
def test_logits_equal_transformers(
    model: str, layout: str, hf_folders: dict[str, Path], megatron_results: Path
) -> None:
    reference = torch.load(hf_folders[model] / "logits.pt")
    logits = torch.load(megatron_results / f"{model}-{layout}.logits.pt")
    vocab = vocabulary(model)
    assert reference.abs().max() > 0.5
    assert (logits[..., :vocab] - reference).abs().max() < (1e-5 if model == "qwen3_5" else 1e-4)
    assert torch.equal(logits[..., vocab:], torch.zeros_like(logits[..., vocab:]))
    assert logits.shape[-1] == vocab + (vocab % 2 if layout == "tp2" else 0)


@every_case
def test_shards_assemble_to_the_checkpoint(
    model: str, layout: str, hf_folders: dict[str, Path], megatron_results: Path
) -> None:
    folder = hf_folders[model]
    cfg = ModelConfig.from_hf(folder)
    expected = trained_tensors(folder, cfg)
    assembled = dict(assemble(all_pieces(megatron_results, folder, model, layout), hf_manifest(cfg)))
    assert list(assembled) == [name for name, _ in hf_manifest(cfg)]
    assert set(assembled) == set(expected)
    assert all(torch.equal(assembled[name], expected[name]) for name in expected)


@every_case
def test_primary_pieces_cover_each_tensor_once(
    model: str, layout: str, hf_folders: dict[str, Path], megatron_results: Path
) -> None:
    covered: dict[str, torch.Tensor] = {}
    for piece in all_pieces(megatron_results, hf_folders[model], model, layout):
        if piece.primary:
            count = covered.setdefault(piece.hf_name, torch.zeros(piece.hf_shape, dtype=torch.int32))
            dim, length = (0, piece.hf_shape[0]) if piece.dim is None else (piece.dim, piece.length)
            count.narrow(dim, piece.start, length).add_(1)
            assert piece.read().shape == piece.shape
            assert piece.view is not None
            assert torch.equal(piece.view().reshape(piece.shape), piece.read())
    manifest = dict(hf_manifest(ModelConfig.from_hf(hf_folders[model])))
    assert {name: tuple(count.shape) for name, count in covered.items()} == manifest
    assert all(bool((count == 1).all()) for count in covered.values())


@pytest.mark.parametrize("model", CONFIGS)
def test_training_equals_transformers(model: str, hf_folders: dict[str, Path], megatron_results: Path) -> None:
    """Loss and gradients of one step, and the same gradients where activations are computed again."""
    reference = torch.load(hf_folders[model] / "training.pt")
    training = torch.load(megatron_results / f"{model}-tp1.training.pt")
    loss, gradients = training["None"]
    torch.testing.assert_close(loss, reference["loss"], rtol=1e-6, atol=1e-6)
    cfg = ModelConfig.from_hf(hf_folders[model])
    for name, gradient in assemble(local_pieces(gradients, cfg, ParallelLayout()), hf_manifest(cfg)):
        torch.testing.assert_close(gradient, reference["gradients"][name], rtol=1e-4, atol=1e-6, msg=name)
        assert gradient.any() or "experts" in name, name
    for setting in ("Full", "Selective"):
        for name, expected in gradients.items():
            torch.testing.assert_close(
                training[setting][1][name], expected, rtol=1e-5, atol=1e-7, msg=f"{setting} {name}"
            )


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_print_no_warnings(rank: int, megatron_results: Path) -> None:
    assert "Warning" not in (megatron_results / f"rank-{rank}.log").read_text()


def test_padding_rows_never_leak(hf_folders: dict[str, Path], megatron_results: Path) -> None:
    folder = hf_folders["qwen3"]
    pieces: list[Piece] = []
    for rank in range(2):
        parameters, parallel = shard(megatron_results, "qwen3", "tp2", rank)
        if rank == 1:
            for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                assert parameters[name].shape[0] == 51
                assert not parameters[name][50].any()
                parameters[name][50] = float("nan")
        pieces += local_pieces(parameters, ModelConfig.from_hf(folder), parallel)
    expected = load_file(folder / "model.safetensors")
    for name, tensor in assemble(pieces, hf_manifest(ModelConfig.from_hf(folder))):
        assert torch.equal(tensor, expected[name]), name


def transformer_engine_name(name: str, cfg: ModelConfig, parallel: ParallelLayout) -> str:
    """Name of the same parameter in layers of Transformer Engine's classes, which MindSpeed stands in for."""
    match = re.search(r"layers\.(\d+)\.", name)
    layer = int(match[1]) + cfg.num_layers // parallel.pp * parallel.pp_rank if match else None
    projection = "in_proj" if layer is not None and cfg.is_linear(layer) else "linear_qkv"
    name = name.replace("input_layernorm.weight", f"self_attention.{projection}.layer_norm_weight")
    if layer is not None and not cfg.is_moe(layer):
        name = name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    return re.sub(r"local_experts\.(\d+)\.(linear_fc\d\.weight)", r"\2\1", name)


@every_case
def test_transformer_engine_names(model: str, layout: str, hf_folders: dict[str, Path], megatron_results: Path) -> None:
    folder = hf_folders[model]
    cfg = ModelConfig.from_hf(folder)
    expected = trained_tensors(folder, cfg)
    pieces: list[Piece] = []
    for rank in range(2):
        parameters, parallel = shard(megatron_results, model, layout, rank)
        renamed = {transformer_engine_name(name, cfg, parallel): tensor for name, tensor in parameters.items()}
        assert len(renamed) == len(parameters)
        assert any(".layer_norm_weight" in name for name in renamed)
        assert not any("input_layernorm" in name or "local_experts" in name for name in renamed)
        assert any("experts.linear_fc1.weight0" in name for name in renamed) == bool(cfg.num_experts)
        wrapped = {f"module.module.{name}": tensor for name, tensor in renamed.items()}
        wrapped["module.module.decoder.layers.0.self_attention._extra_state"] = torch.empty(0)
        pieces += local_pieces(wrapped, cfg, parallel)
        check_write(renamed, cfg, parallel, expected)
    assembled = dict(assemble(pieces, hf_manifest(cfg)))
    assert set(assembled) == set(expected)
    assert all(torch.equal(assembled[name], expected[name]) for name in expected)


def check_write(
    parameters: dict[str, torch.Tensor], cfg: ModelConfig, parallel: ParallelLayout, expected: dict[str, torch.Tensor]
) -> None:
    """Empty parameters become the trained ones when the checkpoint is written into their pieces."""
    empty = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
    for piece in local_pieces(empty, cfg, parallel):
        tensor = expected[piece.hf_name]
        piece.write(tensor if piece.dim is None else tensor.narrow(piece.dim, piece.start, piece.length))
    assert all(torch.equal(empty[name], tensor) for name, tensor in parameters.items())


def test_assemble_refuses_incomplete_and_contradicting_shards(
    hf_folders: dict[str, Path], megatron_results: Path
) -> None:
    folder = hf_folders["qwen3"]
    cfg = ModelConfig.from_hf(folder)
    first, second = (pieces_of_rank(megatron_results, folder, "qwen3", "tp2", rank) for rank in range(2))
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight .* not fully covered.*index 51 of dim 0"):
        list(assemble(first, hf_manifest(cfg)))
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight .* not fully covered.*index 0 of dim 0"):
        list(assemble(second, hf_manifest(cfg)))
    without = [piece for piece in first + second if piece.hf_name != "model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        list(assemble(without, hf_manifest(cfg)))
    parameters, parallel = shard(megatron_results, "qwen3", "tp2", 1)
    parameters["decoder.layers.1.self_attention.k_layernorm.weight"][3] += 1e-3
    changed = local_pieces(parameters, cfg, parallel)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_norm\.weight is covered twice with different"):
        list(assemble(first + changed, hf_manifest(cfg)))
    wrong_dtype = local_pieces({name: tensor.bfloat16() for name, tensor in parameters.items()}, cfg, parallel)
    with pytest.raises(ValueError, match="differ in dtype"):
        list(assemble(first + wrong_dtype, hf_manifest(cfg)))


def test_shard_of_another_layout_or_model_is_refused(hf_folders: dict[str, Path], megatron_results: Path) -> None:
    cfg = ModelConfig.from_hf(hf_folders["qwen3"])
    parameters, parallel = shard(megatron_results, "qwen3", "tp2", 0)
    with pytest.raises(
        ValueError, match=r"embedding\.word_embeddings\.weight has shape \(51, 64\), expected \(101, 64\)"
    ):
        local_pieces(parameters, cfg, dataclasses.replace(parallel, tp=1))
    with pytest.raises(ValueError, match=r"k_layernorm.weight has no counterpart in a qwen2 checkpoint"):
        local_pieces({"decoder.layers.0.self_attention.k_layernorm.weight": torch.ones(32)},
                     ModelConfig.from_hf(hf_folders["qwen2"]), ParallelLayout())  # fmt: skip
    with pytest.raises(ValueError, match=r"decoder\.layers\.1\..* has no counterpart"):
        local_pieces(parameters, cfg, dataclasses.replace(parallel, world_size=4, pp=2))
