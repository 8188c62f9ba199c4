"""The mapping between Megatron's parameters on one rank and the tensors of a Hugging Face checkpoint.

Megatron fuses q, k, v by query group (`[q of the group's heads; k; v]` for each group) and gate with up
(`[gate shard; up shard]` on each tensor-parallel rank). Where attention has an output gate, it comes after the q of all
heads of the group; a checkpoint has each head's gate behind its own q. A linear attention's projections are one,
`[q; k; v; z; b; a]` of the rank's heads, and its convolution is over `[q; k; v]` of them. Everything else is cut along
one dimension or replicated.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rljob_worker.models.config import ModelConfig
from rljob_worker.models.manifest import HEAD, embedding, final_norm, hf_manifest, layer_manifest, layer_prefix
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.tensor_slice import Part, Piece

_LAYER_PARAMETER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_PARAMETER = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<local>\d+)\.)?linear_fc(?P<which>[12])\.weight(?P<grouped>\d*)"
)
_REPLICATED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.out_norm.weight": "linear_attn.norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""Inside a layer, local-spec and Transformer Engine names."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """Place of one HF tensor inside one Megatron parameter."""

    hf_name: str
    part: Part
    """Part as the parameter has it: cut also where it is all of the tensor."""
    select: Callable[[torch.Tensor], torch.Tensor]
    """Parameter -> view; reshaped to the shard's shape it is in HF layout."""
    primary: bool


@dataclass(frozen=True, slots=True)
class _Layout:
    """The shape of a Megatron parameter and the HF tensors in it."""

    shape: tuple[int, ...]
    shards: tuple[_Shard, ...]


def local_pieces(
    source: torch.nn.Module | Mapping[str, torch.Tensor], cfg: ModelConfig, parallel: ParallelLayout
) -> list[Piece]:
    """Everything that one rank holds, in checkpoint order.

    Pieces of a live model are bound to the parameters' storage: make them after Megatron's DistributedDataParallel,
    which moves parameters into its buffer. Replicated parameters (norms, the router, the tied copy of the embedding on
    the last pipeline stage) give pieces on every rank that holds them, one of them `primary`.

    Args:
        source: the model (wrappers allowed), or a rank's saved `name -> tensor`.
        cfg: the model's config.
        parallel: the layout of the rank that holds, or held, `source`.

    Raises:
        ValueError: a parameter without counterpart in the HF checkpoint, or of another shape than cfg and parallel ask.
    """
    named = source.named_parameters() if isinstance(source, torch.nn.Module) else source.items()
    manifest = _shapes(cfg)
    pieces: list[Piece] = []
    for full_name, tensor in named:
        name = re.sub(r"^(module\.)+", "", full_name)
        if name.endswith("_extra_state"):
            continue
        layout = _layout(name, cfg, parallel)
        if layout is None:
            raise ValueError(f"parameter {full_name} has no counterpart in a {cfg.model_type} checkpoint")
        if tuple(tensor.shape) != layout.shape:
            raise ValueError(f"parameter {full_name} has shape {tuple(tensor.shape)}, expected {layout.shape}")
        pieces += [
            _piece(full_name, tensor, shard, manifest[shard.hf_name]) for shard in layout.shards if shard.part.length
        ]
    order = _order(cfg)
    return sorted(pieces, key=lambda piece: order[piece.hf_name])


@functools.cache
def _shapes(cfg: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    return dict(hf_manifest(cfg))


@functools.cache
def _order(cfg: ModelConfig) -> Mapping[str, int]:
    return {name: position for position, name in enumerate(_shapes(cfg))}


def is_expert(parameter: str) -> bool:
    """Whether a Megatron parameter belongs to an expert, which is cut and replicated in a way of its own."""
    match = _LAYER_PARAMETER.search(parameter)
    return match is not None and _EXPERT_PARAMETER.fullmatch(match[2]) is not None


def _piece(name: str, tensor: torch.Tensor, shard: _Shard, hf_shape: tuple[int, ...]) -> Piece:
    part = shard.part
    dim = None if part.dim is None or part.length == hf_shape[part.dim] else part.dim
    shape = list(hf_shape)
    if dim is not None:
        shape[dim] = part.length
    access = _Access(name, tensor, shard.select(tensor.detach()), tuple(shape))
    length = hf_shape[0] if dim is None else part.length
    start = 0 if dim is None else part.start
    return Piece(
        shard.hf_name,
        hf_shape,
        dim,
        start,
        length,
        access.read,
        access.view,
        tensor.data_ptr,
        access.write,
        shard.primary,
    )


class _Access:
    """Reads and writes one shard through a view made once; refuses when the parameter has moved since."""

    __slots__ = ("_address", "_flat", "_name", "_shape", "_tensor", "_view")

    def __init__(self, name: str, tensor: torch.Tensor, view: torch.Tensor, shape: tuple[int, ...]) -> None:
        self._name, self._tensor, self._view, self._shape = name, tensor, view, shape
        self._address = tensor.data_ptr()
        reshaped = view.reshape(shape)
        self._flat = reshaped if reshaped.data_ptr() == view.data_ptr() else None

    def read(self) -> torch.Tensor:
        self._check()
        return self._view.reshape(self._shape) if self._flat is None else self._flat

    def view(self) -> torch.Tensor:
        self._check()
        return self._view if self._flat is None else self._flat

    def write(self, shard: torch.Tensor) -> None:
        self._check()
        if tuple(shard.shape) != self._shape:
            raise ValueError(f"parameter {self._name} takes a shard of shape {self._shape}, got {tuple(shard.shape)}")
        with torch.no_grad():
            self._view.copy_(shard.reshape(self._view.shape))

    def _check(self) -> None:
        if self._tensor.data_ptr() != self._address:
            raise RuntimeError(
                f"parameter {self._name} has moved in memory since its pieces were made; make them again "
                "(after DistributedDataParallel, which moves parameters)"
            )


def _layout(name: str, cfg: ModelConfig, parallel: ParallelLayout) -> _Layout | None:
    hidden = cfg.hidden_size
    dense_owner = parallel.dp_rank == 0
    if name == "embedding.word_embeddings.weight":
        return _vocabulary(embedding(cfg), cfg, parallel, dense_owner)
    if cfg.value_head and name.startswith("output_layer."):
        # Each tensor-parallel rank has all of it.
        place = int(name.endswith(".bias"))
        return _replicated(cfg.value_head[place], ((1, hidden), (1,))[place], dense_owner and parallel.tp_rank == 0)
    if name == "output_layer.weight":
        # With tied embeddings only a last pipeline stage that is not the first has it: a copy.
        hf_name = embedding(cfg) if cfg.tied_embeddings else HEAD
        return _vocabulary(hf_name, cfg, parallel, dense_owner and not cfg.tied_embeddings)
    if name == "decoder.final_layernorm.weight":
        return _replicated(final_norm(cfg), (hidden,), dense_owner and parallel.tp_rank == 0)
    match = _LAYER_PARAMETER.fullmatch(name)
    layers = cfg.num_layers // parallel.pp
    if match is None or int(match[1]) >= layers:
        return None
    layer = int(match[1]) + layers * parallel.pp_rank
    prefix, rest = layer_prefix(cfg, layer), match[2]
    if rest in _REPLICATED:
        shape = dict(layer_manifest(cfg, layer)).get(_REPLICATED[rest])
        if shape is None:
            return None
        return _replicated(prefix + _REPLICATED[rest], shape, dense_owner and parallel.tp_rank == 0)
    if cfg.is_linear(layer) and rest.startswith("self_attention."):
        return _linear_attention(prefix + "linear_attn.", rest.removeprefix("self_attention."), cfg, parallel)
    if rest == "self_attention.linear_qkv.weight" or (rest == "self_attention.linear_qkv.bias" and cfg.qkv_bias):
        return _fused_qkv(prefix, rest.rpartition(".")[2], cfg, parallel, dense_owner)
    if rest == "self_attention.linear_proj.weight":
        width = cfg.num_heads * cfg.head_dim
        return _row_parallel(prefix + "self_attn.o_proj.weight", hidden, width, parallel, dense_owner)
    if rest == "mlp.linear_fc1.weight" and not cfg.is_moe(layer):
        return _fused_gate_up(prefix + "mlp.", hidden, cfg.ffn_hidden_size, parallel, dense_owner)
    if rest == "mlp.linear_fc2.weight" and not cfg.is_moe(layer):
        return _row_parallel(prefix + "mlp.down_proj.weight", hidden, cfg.ffn_hidden_size, parallel, dense_owner)
    return _expert(prefix, rest, cfg, parallel) if cfg.is_moe(layer) else None


def _expert(prefix: str, rest: str, cfg: ModelConfig, parallel: ParallelLayout) -> _Layout | None:
    match = _EXPERT_PARAMETER.fullmatch(rest)
    number = (match["local"] or match["grouped"]) if match else None
    local_experts = cfg.num_experts // parallel.ep
    if match is None or not number or int(number) >= local_experts:
        return None
    prefix = f"{prefix}mlp.experts.{int(number) + local_experts * parallel.ep_rank}."
    owner, width = parallel.expert_dp_rank == 0, cfg.expert_ffn_hidden_size
    cut = ParallelLayout(parallel.expert_tp, tp=parallel.expert_tp, rank=parallel.rank % parallel.expert_tp)
    if match["which"] == "1":
        return _fused_gate_up(prefix, cfg.hidden_size, width, cut, owner)
    return _row_parallel(prefix + "down_proj.weight", cfg.hidden_size, width, cut, owner)


def _replicated(hf_name: str, shape: tuple[int, ...], primary: bool) -> _Layout:
    return _Layout(shape, (_Shard(hf_name, Part(None, 0, shape[0]), lambda parameter: parameter, primary),))


def _vocabulary(hf_name: str, cfg: ModelConfig, parallel: ParallelLayout, primary: bool) -> _Layout:
    rows = cfg.padded_vocab_size(parallel.tp) // parallel.tp
    start = rows * parallel.tp_rank
    length = max(0, min(rows, cfg.vocab_size - start))
    shard = _Shard(hf_name, Part(0, start, length), lambda parameter: parameter[:length], primary)
    return _Layout((rows, cfg.hidden_size), (shard,))


def _row_parallel(hf_name: str, rows: int, width: int, parallel: ParallelLayout, primary: bool) -> _Layout:
    columns = width // parallel.tp
    shard = _Shard(hf_name, Part(1, columns * parallel.tp_rank, columns), lambda parameter: parameter, primary)
    return _Layout((rows, columns), (shard,))


def _fused_gate_up(prefix: str, hidden: int, width: int, parallel: ParallelLayout, primary: bool) -> _Layout:
    rows = width // parallel.tp
    part = Part(0, rows * parallel.tp_rank, rows)
    gate = _Shard(prefix + "gate_proj.weight", part, lambda parameter: parameter[:rows], primary)
    up = _Shard(prefix + "up_proj.weight", part, lambda parameter: parameter[rows:], primary)
    return _Layout((2 * rows, hidden), (gate, up))


def _fused_qkv(prefix: str, kind: str, cfg: ModelConfig, parallel: ParallelLayout, primary: bool) -> _Layout:
    groups, width = cfg.num_query_groups // parallel.tp, cfg.head_dim
    heads, kinds = cfg.num_heads // cfg.num_query_groups, 2 if cfg.output_gate else 1
    trailing = (cfg.hidden_size,) if kind == "weight" else ()
    rows = kinds * heads + 2

    def shard(which: str, first: int, count: int) -> _Shard:
        def select(parameter: torch.Tensor) -> torch.Tensor:
            if which == "q" and kinds > 1:
                parts = parameter.view(groups, rows, width, *trailing).narrow(1, first, count)
                return parts.unflatten(1, (kinds, heads)).transpose(1, 2)
            return parameter.view(groups, rows * width, *trailing).narrow(1, first * width, count * width)

        length = groups * count * width
        part = Part(0, length * parallel.tp_rank, length)
        return _Shard(f"{prefix}self_attn.{which}_proj.{kind}", part, select, primary)

    queries = kinds * heads
    shards = (shard("q", 0, queries), shard("k", queries, 1), shard("v", queries + 1, 1))
    return _Layout((groups * rows * width, *trailing), shards)


def _linear_attention(prefix: str, rest: str, cfg: ModelConfig, parallel: ParallelLayout) -> _Layout | None:
    sizes = cfg.linear_attention
    assert sizes is not None
    primary = parallel.dp_rank == 0
    key, value, heads = sizes.key_width, sizes.value_width, sizes.value_heads
    if rest == "out_proj.weight":
        return _row_parallel(prefix + rest, cfg.hidden_size, value, parallel, primary)
    if rest in ("A_log", "dt_bias"):
        return _stacked([(prefix + rest, (heads,))], (), parallel, primary)
    if rest == "conv1d.weight":
        return _stacked([(prefix + rest, (key, key, value))], (1, sizes.kernel_size), parallel, primary)
    if rest == "in_proj.weight":
        blocks = [("qkv", (key, key, value)), ("z", (value,)), ("b", (heads,)), ("a", (heads,))]
        named = [(f"{prefix}in_proj_{which}.weight", rows) for which, rows in blocks]
        return _stacked(named, (cfg.hidden_size,), parallel, primary)
    return None


def _stacked(
    tensors: Sequence[tuple[str, tuple[int, ...]]], trailing: tuple[int, ...], parallel: ParallelLayout, primary: bool
) -> _Layout:
    """A rank's rows of each block of some tensors, one below the other; each tensor has blocks of so many rows."""
    shards: list[_Shard] = []
    local = 0
    for name, blocks in tensors:
        start = 0
        for rows in blocks:
            count = rows // parallel.tp
            select = functools.partial(torch.narrow, dim=0, start=local, length=count)
            shards.append(_Shard(name, Part(0, start + count * parallel.tp_rank, count), select, primary))
            start, local = start + rows, local + count
    return _Layout((local, *trailing), tuple(shards))
