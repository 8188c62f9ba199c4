"""transformers' models without memory, and where in their parameters a checkpoint's tensors are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.architectures import ARCHITECTURES, BASE
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from rljob_worker.errors import UserError
from rljob_worker.models import hf_io
from rljob_worker.models.checkpoint_views import CheckpointView, check_headers, checkpoint_views
from rljob_worker.models.hf_io import open_tensors, tensor_files
from rljob_worker.models.hf_model import build_hf_model
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.trainer.assemble import assemble
from rljob_worker.trainer.fsdp.pieces import pieces_of_rows, rows_of


def real_model(config: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_have_no_memory_and_buffers_are_real(name: str) -> None:
    real, made = real_model(ARCHITECTURES[name]), build_hf_model(ARCHITECTURES[name])
    assert all(parameter.is_meta for parameter in made.parameters())
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    buffers, expected = dict(made.named_buffers()), dict(real.named_buffers())
    assert buffers.keys() == expected.keys()
    assert all(torch.equal(buffer, expected[n]) for n, buffer in buffers.items())
    assert made.get_input_embeddings().padding_idx is None, "torch gives the padding row no gradient"
    assert made.config._attn_implementation == ("eager" if name == "gemma2" else "sdpa")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_of_three_ranks_are_the_checkpoint_once(name: str) -> None:
    """No rank reads more than its rows, and together they have every tensor, under the names of a checkpoint."""
    real = real_model(ARCHITECTURES[name])
    views = checkpoint_views(build_hf_model(ARCHITECTURES[name]))
    whole = {n: parameter.detach() for n, parameter in real.named_parameters()}
    expected = revert_weight_conversion(real, dict(whole))
    sizes = {n: parameter.shape[0] for n, parameter in whole.items()}
    pieces = []
    for layout in ParallelLayout(3, shards=3).every_rank():
        shard = {}
        for n, parameter in whole.items():
            rows = rows_of(sizes[n], layout)
            shard[n] = parameter[rows.start : rows.stop].clone()
        held = pieces_of_rows(shard, views, sizes, layout)
        assert sum(math.prod(piece.shape) for piece in held) == sum(rows.numel() for rows in shard.values())
        pieces += held
    together = dict(assemble(pieces, [(view.name, view.shape) for view in views]))
    assert together.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in together.items())


class CountedTensor:
    """A tensor of an open file, with the bytes that slices of it were read as."""

    def __init__(self, stored: Any, read: list[int]) -> None:
        self._stored, self._read = stored, read

    def __getitem__(self, part: Any) -> torch.Tensor:
        found: torch.Tensor = self._stored[part]
        self._read.append(found.nbytes)
        return found


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_rank_reads_the_bytes_of_its_rows_and_no_more(name: str, tmp_path: Path) -> None:
    """Counted where files are read, of a checkpoint in bf16 for rows in fp32; at most one tensor's at a time."""
    real = real_model(ARCHITECTURES[name]).bfloat16()
    real.save_pretrained(tmp_path)
    views = checkpoint_views(build_hf_model(ARCHITECTURES[name]))
    sizes = {n: parameter.shape[0] for n, parameter in real.named_parameters()}
    files = tensor_files(tmp_path)
    total = 0
    for layout in ParallelLayout(3, shards=3).every_rank():
        rows = {n: torch.zeros(len(rows_of(sizes[n], layout)), *p.shape[1:]) for n, p in real.named_parameters()}
        read: list[int] = []

        def counted(path: Path, read: list[int] = read) -> Any:
            file = open_tensors(path)
            opened = mock.MagicMock()
            opened.__enter__.return_value.get_slice = lambda name: CountedTensor(file.get_slice(name), read)
            return opened

        with mock.patch.object(hf_io, "open_tensors", counted):
            hf_io.read_pieces(pieces_of_rows(rows, views, sizes, layout), files)
        assert sum(read) == 2 * sum(tensor.numel() for tensor in rows.values())
        assert max(read) <= 2 * max(tensor.numel() for tensor in rows.values())
        total += sum(read)
        for n, tensor in rows.items():
            mine = rows_of(sizes[n], layout)
            assert torch.equal(tensor, dict(real.named_parameters())[n][mine.start : mine.stop].float()), n
    assert total == sum(parameter.nbytes for parameter in real.parameters())


def test_pieces_write_where_they_read() -> None:
    views = checkpoint_views(build_hf_model(ARCHITECTURES["mixtral"]))
    model = build_hf_model(ARCHITECTURES["mixtral"])
    sizes = {n: parameter.shape[0] for n, parameter in model.named_parameters()}
    layout = ParallelLayout(2, shards=2, rank=1)
    shard = {n: torch.zeros(len(rows_of(sizes[n], layout)), *p.shape[1:]) for n, p in model.named_parameters()}
    for number, piece in enumerate(pieces_of_rows(shard, views, sizes, layout), start=1):
        piece.write(torch.full(piece.shape, number, dtype=torch.bfloat16))
        assert bool((piece.read() == number).all())
    assert all(bool((rows > 0).all()) for rows in shard.values())


def test_further_copies_are_not_primary() -> None:
    view = CheckpointView("w", "w", (4, 2), (2, 1), 0, 2)
    layouts = ParallelLayout(4, shards=2).every_rank()
    held = [pieces_of_rows({"w": torch.zeros(2, 2)}, [view], {"w": 4}, layout) for layout in layouts]
    assert [(piece.start, piece.primary) for [piece] in held] == [(0, True), (2, True), (0, False), (2, False)]


@pytest.mark.parametrize(
    ("view", "rows"),
    [
        (CheckpointView("t", "p", (4, 3), (1, 4), 0, 4), [(1, 0, 2), (1, 2, 1)]),
        (CheckpointView("t", "p", (2, 2), (2, 1), 8, 4), [None, (None, 0, 2)]),
        (CheckpointView("t", "p", (3,), (4,), 1, 4), [(0, 0, 2), (0, 2, 1)]),
    ],
)
def test_a_view_is_cut_along_the_dimension_of_the_rows(view: CheckpointView, rows: list[Any]) -> None:
    """A parameter of three rows on two ranks: transposed, inside of a row, and a column."""
    parameter = torch.arange(12.0).view(3, 4)
    whole = parameter.as_strided(view.shape, view.stride, view.offset)
    for (first, count), expected in zip(((0, 2), (2, 1)), rows):
        found = view.rows(first, count)
        assert (found is None) == (expected is None)
        if found is not None:
            place, inside = found
            assert (place.dim, place.start, place.length) == expected
            assert torch.equal(inside.of(parameter[first : first + count].clone()), place.part.of(whole))


def test_a_tensor_over_rows_that_are_not_whole_is_refused() -> None:
    view = CheckpointView("t", "p", (4, 3), (3, 1), 0, 6)
    with pytest.raises(UserError, match="tensor t is no range of rows of p, nor in one of them"):
        view.rows(0, 1)


def test_headers_decide() -> None:
    views = checkpoint_views(build_hf_model(ARCHITECTURES["llama_tied"]))
    shapes = {view.name: view.shape for view in views}
    check_headers(views, shapes | {"model.layers.0.self_attn.rotary_emb.inv_freq": (16,)}, "folder")
    for name, wrong, message in (
        ("model.norm.weight", None, "folder: tensor model.norm.weight is missing"),
        ("model.norm.weight", (5,), r"tensor model.norm.weight has shape \(5,\), the model's is \(128,\)"),
        ("model.layers.0.mlp.up_proj.weight", (128, 96), r"has shape \(128, 96\), the model's is \(96, 128\)"),
        ("lm_head.weight", (67, 128), "tensor lm_head.weight is not part of the model"),
    ):
        given = {n: s for n, s in shapes.items() if n != name} | ({name: wrong} if wrong else {})
        with pytest.raises(UserError, match=message):
            check_headers(views, given, "folder")
    check_headers(views, shapes | {"lm_head.weight": (67, 128)}, "folder", may_have=["lm_head.weight"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "never"}, "model_type 'never' is no model that transformers has"),
        (
            {"model_type": "llava", "text_config": {}},
            "'llava' is of a model that sees; of those, training.backend FSDP trains qwen2_5_vl and qwen3_vl",
        ),
        ({"model_type": "t5"}, "transformers has no model of causal language modelling for 't5'"),
        ({"model_type": "rwkv"}, "'rwkv' has layers with a state"),
        ({"model_type": "mamba"}, "'mamba' has mamba; training.backend FSDP trains attention alone"),
        (BASE | {"model_type": "qwen3_next"}, "'qwen3_next' has linear_attention"),
        (BASE | {"model_type": "llama", "quantization_config": {"bits": 4}}, "use an unquantized checkpoint"),
        (
            BASE
            | {"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
            "the checkpoint has model.layers.1.mlp.gate.e_score_correction_bias, which is no parameter",
        ),
    ],
)
def test_what_would_be_trained_wrongly_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_hf_model(config)
