"""Files that ranks of one layout saved, for the ranks of another one; without Megatron."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import qwen3_5
from torch import Tensor

from rljob_api.json_types import Json
from rljob_api.spec import RolloutSpec, TrainingBackend
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.manifest import hf_manifest
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.trainer.export import export_checkpoint
from rljob_worker.trainer.megatron.models import convert
from rljob_worker.trainer.megatron.models.convert import is_expert, local_pieces
from rljob_worker.trainer.megatron.saved_format import MegatronFormat
from rljob_worker.trainer.saved_state import MODEL_PREFIX, SavedState, open_rank_file, saved_format, state_metadata
from rljob_worker.trainer.state_file import StateReader, path_of, write_state

SHAPE = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
LINEAR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 2, "linear_value_head_dim": 3}
LINEAR |= {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}
HYBRID = ModelConfig.from_hf({"model_type": "qwen3_5", "text_config": SHAPE | LINEAR})
DENSE = ModelConfig.from_hf(SHAPE | {"model_type": "qwen3", "tie_word_embeddings": True})
MOE = ModelConfig.from_hf(SHAPE | EXPERTS | {"model_type": "qwen3_moe", "mlp_only_layers": [1]})
LAYOUTS = {
    DENSE: [(1, 1, 1, 1), (2, 1, 1, 1), (4, 2, 2, 1), (3, 1, 1, 1), (4, 4, 1, 1), (8, 2, 2, 1)],
    HYBRID: [(1, 1, 1, 1), (2, 2, 1, 1), (4, 4, 1, 1), (4, 2, 2, 1)],
    MOE: [(1, 1, 1, 1), (2, 1, 1, 2), (4, 1, 2, 2), (3, 1, 1, 1), (4, 1, 1, 4), (4, 2, 1, 1), (4, 2, 1, 2)],
}
"""World size, tensor, pipeline, expert; 13 rows of the vocabulary leave padding in each cut by tensor parallelism."""
PAIRS = [(cfg, *pair) for cfg, layouts in LAYOUTS.items() for pair in itertools.pairwise([*layouts, layouts[0]])]
ROLLOUT = RolloutSpec.model_validate({"promptsPerStep": 1, "samplesPerPrompt": 2, "maxResponseTokens": 4})
KINDS = (MODEL_PREFIX, "exp_avg.", "exp_avg_sq.", "master.")


def shapes(cfg: ModelConfig, at: ParallelLayout) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Megatron's parameters of one rank."""
    names = ["embedding.word_embeddings.weight"] if at.first_stage else []
    for layer in range(cfg.num_layers // at.pp):
        inside = [*convert._REPLICATED, "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"]
        inside += [f"mlp.linear_fc{which}.weight" for which in (1, 2)]
        linear = ("A_log", "dt_bias", "conv1d.weight", "in_proj.weight", "out_proj.weight")
        inside += [f"self_attention.{name}" for name in linear]
        local = range(cfg.num_experts // at.ep)
        inside += [f"mlp.experts.local_experts.{n}.linear_fc{which}.weight" for n in local for which in (1, 2)]
        # Names of local specs alone: the others are Transformer Engine's for the same tensors.
        names += [f"decoder.layers.{layer}.{name}" for name in inside if "layer_norm_weight" not in name]
    if at.last_stage:
        names.append("decoder.final_layernorm.weight")
        if not cfg.tied_embeddings or not at.first_stage:
            names.append("output_layer.weight")
    for name in names:
        layout = convert._layout(name, cfg, at)
        if layout is not None:
            yield name, layout.shape


def filled(name: str, shape: tuple[int, ...], whole: dict[str, Tensor], cfg: ModelConfig, at: ParallelLayout) -> Tensor:
    """A rank's parameter with its part of the whole tensors, -1 in padding."""
    tensor = torch.full(shape, -1.0)
    for piece in local_pieces({name: tensor}, cfg, at):
        piece.write(piece.part.of(whole[piece.hf_name]))
    return tensor


def save(folder: Path, cfg: ModelConfig, layout: ParallelLayout, whole: dict[str, dict[str, Tensor]]) -> None:
    """Each rank's file; replicas share the optimizer's tensors unevenly, and one may have nothing of a parameter."""
    for at in layout.every_rank():
        tensors: dict[str, Tensor] = {}
        for number, (name, shape) in enumerate(shapes(cfg, at)):
            tensors[MODEL_PREFIX + name] = filled(name, shape, whole[MODEL_PREFIX], cfg, at)
            replicas = at.replicas(experts=is_expert(name))
            ends = [0, *(math.prod(shape) * (n + number % 2) // len(replicas) for n in range(1, len(replicas)))]
            ends.append(math.prod(shape))
            mine = slice(*ends[replicas.index(at.rank) :][:2])
            if mine.start == mine.stop:
                continue
            tensors["step." + name] = torch.tensor(7.0)
            for kind in KINDS[1:]:
                tensors[kind + name] = filled(name, shape, whole[kind], cfg, at).flatten()[mine]
        write_state(path_of(folder, at.rank), tensors, {"coordinates": at.coordinates()})


def opened(folder: Path, cfg: ModelConfig) -> SavedState:
    return SavedState(folder, lambda _reader: MegatronFormat(cfg))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[ModelConfig, tuple[int, ...]], Path]:
    folders = {}
    for cfg, layouts in LAYOUTS.items():
        for sizes in layouts:
            folder = folders[cfg, sizes] = tmp_path_factory.mktemp("saved")
            save(folder, cfg, ParallelLayout(*sizes), whole_tensors(cfg))
    return folders


def whole_tensors(cfg: ModelConfig) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return {kind: {n: torch.rand(s, generator=generator) for n, s in hf_manifest(cfg)} for kind in KINDS}


@pytest.mark.parametrize(("cfg", "there", "here"), PAIRS)
def test_each_rank_gets_what_was_saved_of_its_parameters(
    cfg: ModelConfig, there: tuple[int, ...], here: tuple[int, ...], saved: dict[object, Path]
) -> None:
    state, whole = opened(saved[cfg, there], cfg), whole_tensors(cfg)
    for at in ParallelLayout(*here).every_rank():
        for name, shape in shapes(cfg, at):
            for kind in KINDS:
                target = torch.full(shape, -1.0)
                pieces = local_pieces({name: target}, cfg, at)
                state.fill(kind, pieces)
                assert torch.equal(target, filled(name, shape, whole[kind], cfg, at)), (at, kind, name)
            assert state.updates_of(name, pieces) == (0 if (target == -1).all() else 7)


def test_what_is_not_whole_is_named(tmp_path: Path) -> None:
    layout, whole = ParallelLayout(2, 2), whole_tensors(DENSE)
    at = ParallelLayout()
    name, shape = "decoder.layers.0.self_attention.linear_proj.weight", (16, 32)

    save(tmp_path, DENSE, layout, whole)
    path_of(tmp_path, 1).unlink()
    with pytest.raises(ValueError, match=r"rank-00001.safetensors: no such file"):
        opened(tmp_path, DENSE)

    saved = {MODEL_PREFIX + name: torch.zeros(16, 16), "exp_avg." + name: torch.zeros(16 * 16 - 3)}
    saved |= {"step." + name: torch.tensor(2.0)}
    write_state(path_of(tmp_path, 1), saved, {"coordinates": ParallelLayout(2, 1, 2, 1, 1).coordinates()})
    with pytest.raises(ValueError, match=r"rank-00001.safetensors: was saved by .*pp=2.*rank 0 beside it by .*tp=2"):
        opened(tmp_path, DENSE)

    write_state(path_of(tmp_path, 1), saved, {"coordinates": ParallelLayout(2, 2, rank=1).coordinates()})
    state = opened(tmp_path, DENSE)
    pieces = local_pieces({name: torch.zeros(shape)}, DENSE, at)
    with pytest.raises(
        ValueError, match=f"exp_avg.{name} of rank 1 and its replicas has 253 elements, its parameter 256"
    ):
        state.fill("exp_avg.", pieces)
    with pytest.raises(ValueError, match=rf"parts of {name} were updated \[2.0, 7.0\] times"):
        state.updates_of(name, pieces)
    down = local_pieces({"decoder.layers.0.mlp.linear_fc2.weight": torch.zeros(16, 32)}, DENSE, at)
    with pytest.raises(ValueError, match=r"mlp.down_proj.weight: 256 of 512 elements were saved"):
        state.fill(MODEL_PREFIX, down)


@pytest.mark.parametrize("backend", ["Megatron", None])
def test_a_file_without_its_backends_name_is_megatrons(backend: str | None, tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_state(path, {}, {} if backend is None else {"backend": backend})
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "qwen3"}))
    assert isinstance(saved_format(StateReader(path), tmp_path), MegatronFormat)


@pytest.mark.parametrize("backend", ["Fairscale", 3, ["Megatron"]])
def test_a_file_of_an_unknown_backend_is_named(backend: Json, tmp_path: Path) -> None:
    write_state(tmp_path / "state", {}, {"backend": backend})
    with pytest.raises(ValueError, match=r"state: was saved by the training backend .*; this version reads Megatron"):
        saved_format(StateReader(tmp_path / "state"), tmp_path)


def test_export_keeps_what_is_not_trained(tmp_path: Path) -> None:
    """From two tensor-parallel ranks; transformers loads it, and what was not trained is there as it was."""
    from transformers import AutoModelForCausalLM

    config, model, own = qwen3_5.config(), tmp_path / "model", tmp_path / "own"
    qwen3_5.write_folder(qwen3_5.language_half(config), config, model)
    own.mkdir()
    (own / "tokenizer.json").write_text("{}")
    (own / "config.json").write_text(json.dumps(config))
    pictures = ("preprocessor_config.json", "processor_config.json")
    for name in pictures:
        (model / name).write_text('{"patch_size": 8}')
    cfg, before = ModelConfig.from_hf(model), load_file(model / "model.safetensors")
    trained = {name: before[name] + 1 for name, _ in hf_manifest(cfg)}
    (tmp_path / "step-3").mkdir()
    save(tmp_path / "step-3", cfg, ParallelLayout(2, 2), dict.fromkeys(KINDS, trained))
    with pytest.raises(ValueError, match="is exported with what is not trained: give its beginning"):
        export_checkpoint(tmp_path / "step-3", own, tmp_path / "out", 2, ROLLOUT)
    export_checkpoint(tmp_path / "step-3", own, tmp_path / "out", 2, ROLLOUT, model)

    after = load_file(tmp_path / "out" / "model.safetensors")
    left = {name for name in before if name.startswith(("model.visual.", "mtp."))}
    assert len(left) == 3
    assert after.keys() == trained.keys() | left
    assert all(torch.equal(after[name], trained.get(name, before[name])) for name in after)
    assert [(tmp_path / "out" / name).read_text() for name in pictures] == ['{"patch_size": 8}'] * 2
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = {qwen3_5.published_name(name): tensor for name, tensor in loaded.state_dict().items()}
    assert state.keys() == trained.keys()
    assert all(torch.equal(state[name], trained[name]) for name in trained)


@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 1), (2, 4)])
def test_another_context_parallel_size_reads_the_files_as_they_are(tmp_path: Path, there: int, here: int) -> None:
    backend = TrainingBackend.MEGATRON
    for saved in ParallelLayout(4, cp=there).every_rank():
        metadata = state_metadata(backend, saved, updates=3, precision="fp32")
        write_state(path_of(tmp_path, saved.rank), {"model.a": torch.full((2,), float(saved.rank))}, metadata)
    for layout in ParallelLayout(4, cp=here).every_rank():
        opened = open_rank_file(str(tmp_path), backend, layout, "fp32")
        assert (opened.updates, opened.resharded) == (3, "")
        assert opened.reader.read("model.a").tolist() == [layout.rank] * 2
    path_of(tmp_path, 2).rename(path_of(tmp_path, 1))
    with pytest.raises(ValueError, match=r"rank-00001\.safetensors: was saved by rank 2, or is missing"):
        open_rank_file(str(tmp_path), backend, ParallelLayout(4, rank=1, cp=here), "fp32")
