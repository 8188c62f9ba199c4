"""Bytes that a rank of FSDP keeps between micro-batches, and those that it gathers and keeps in a pass.

What a pass keeps follows from running transformers' own model on tensors without memory: any architecture, and no
formula for any.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rljob_api.spec import LoraHandover, LoraSpec, Recompute, RLJobSpec
from rljob_worker.models.adapters import add_adapters
from rljob_worker.models.hf_model import build_hf_model, has_packed_attention, plain_head
from rljob_worker.models.transformers_model import TransformersModel, elements
from rljob_worker.planning.activations import PassBytes, all_logits_bytes, head_work, logits_bytes, loss_chunks
from rljob_worker.planning.job_shape import JobShape, MicroBatch, itemsize
from rljob_worker.planning.parameters import TrainingState
from rljob_worker.tensor_slice import storage_of
from rljob_worker.trainer.fsdp.attention import register_packed_attention
from rljob_worker.trainer.state_buckets import most_elements

if TYPE_CHECKING:
    from rljob_worker.models.hf_model import HfModel

_FP32 = 4


def fsdp_state(spec: RLJobSpec, model: TransformersModel, job: JobShape) -> TrainingState:
    """This rank's rows: what is trained, fp32, and two moments, all the time. Gradients are there in training passes
    alone. With adapters they are what is trained, and the model's own weights are in the format of computation. A
    frozen tower has fp32 rows alone."""
    shards, lora = job.trainers.shards, spec.training.lora
    rows = [_rows(shape, shards) for shape in model.parameters]
    tower = [_rows(shape, shards) for shape in model.frozen]
    trained = [_rows(shape, shards) for layer in model.adapters(lora) for shape in layer]
    frozen = sum(rows) * itemsize(spec)
    if lora is None:
        # Of equal shapes one is as good as another.
        trained, frozen = list((Counter(rows) - Counter(tower)).elements()), sum(tower) * _FP32
    return TrainingState(
        weights=frozen + sum(trained) * _FP32,
        trained=sum(trained) * _FP32,
        gradients=0,
        optimizer=2 * sum(trained) * _FP32,
        exchanged=0,
        on_device=2 * most_elements(sum(trained), trained) * _FP32,
        merging=_merging(spec, model),
    )


def fsdp_training_pass(spec: RLJobSpec, model: TransformersModel, job: JobShape, batch: MicroBatch) -> PassBytes:
    """Forward and backward.

    The next layer is gathered while one computes, and a layer's gradients are whole, in the format of computation and
    in fp32, before each rank gets the sums of its rows.
    """
    batch = batch.share(job.trainers.cp)
    size, kept, chunks = itemsize(spec), _saved(spec, model, job, batch), loss_chunks(model, job)
    activations = kept.outside + sum(kept.layers)
    if spec.training.recompute is not Recompute.NONE:
        activations = kept.outside + len(kept.layers) * kept.input + max(kept.layers)
    layer_gradients = batch.tokens * size * (2 * model.hidden_size + 3 * model.mlp_width)
    reduced = _largest(model) * (size + _FP32)
    # A head that is trained: with adapters none is.
    adds_up = kept.plain_head and spec.training.lora is None
    if spec.training.lora is not None:
        reduced = 2 * max(map(elements, model.adapters(spec.training.lora))) * _FP32
        # Gradients of a module's adapter are computed in fp32, of its input and of its output's gradient.
        widest = max(module.inputs + module.outputs for module in model.linear)
        layer_gradients += max(batch.tokens * widest * _FP32, _merged(spec, model))
    return PassBytes(
        activations,
        _logits(spec, model, job, batch, kept, copies=2),
        max(layer_gradients + reduced, head_work(spec, model, job, batch) if adds_up else chunks),
        gathered=_gathered(spec, model),
        gradients=fsdp_state(spec, model, job).trained,
    )


def fsdp_forward_pass(spec: RLJobSpec, model: TransformersModel, job: JobShape, batch: MicroBatch) -> PassBytes:
    """Forward only: nothing is kept but the layer at work; then logits without their gradient."""
    batch = batch.share(job.trainers.cp)
    kept = _saved(spec, model, job, batch)
    return PassBytes(
        max(kept.layers) + kept.input,
        _logits(spec, model, job, batch, kept, copies=1),
        max(loss_chunks(model, job), _merged(spec, model)),
        gathered=_gathered(spec, model),
    )


def _logits(
    spec: RLJobSpec, model: TransformersModel, job: JobShape, batch: MicroBatch, kept: SavedBytes, *, copies: int
) -> int:
    """Logits that are there at once; all, in so many copies, where the model changes them after its head."""
    if kept.plain_head:
        return logits_bytes(spec, model, job, batch)
    return all_logits_bytes(spec, model, job, batch, copies=copies)


def _saved(spec: RLJobSpec, model: TransformersModel, job: JobShape, own: MicroBatch) -> SavedBytes:
    """Bytes that a pass over a rank's own share of a micro-batch keeps."""
    lora, ranks = spec.training.lora, job.trainers.cp
    given = "" if lora is None else lora.model_dump_json(by_alias=True)
    return saved_bytes(model.config, own.tokens, own.longest, own.responses, itemsize(spec), given, ranks)


def _merges(spec: RLJobSpec) -> bool:
    return spec.training.lora is not None and spec.training.lora.handover is LoraHandover.MERGED


def _merging(spec: RLJobSpec, model: TransformersModel) -> int:
    if not _merges(spec):
        return 0
    return sum(map(elements, model.adapters(spec.training.lora))) * _FP32 + _merged(spec, model)


def _merged(spec: RLJobSpec, model: TransformersModel) -> int:
    """One module's weights with its adapter: the product and the sum in fp32, and the sum rounded."""
    if not _merges(spec):
        return 0
    return max(module.inputs * module.outputs for module in model.linear) * (2 * _FP32 + itemsize(spec))


def _rows(shape: tuple[int, ...], shards: int) -> int:
    """Elements of the first rank's rows of a parameter, padding and all."""
    return -(-shape[0] // shards) * elements((shape[1:],))


def _largest(model: TransformersModel) -> int:
    return max(elements(unit) for unit in (*model.units, model.root))


def _gathered(spec: RLJobSpec, model: TransformersModel) -> int:
    fsdp, adapters = spec.training.fsdp, model.adapters(spec.training.lora)
    if fsdp is not None and not fsdp.reshard_after_forward:
        return elements(model.parameters) * itemsize(spec) + sum(map(elements, adapters)) * _FP32
    largest = max(elements(unit) for unit in model.units)
    beside = 2 * max(map(elements, adapters), default=0) * _FP32
    return (2 * largest + elements(model.root)) * itemsize(spec) + beside


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes that a forward pass keeps for the backward pass."""

    layers: tuple[int, ...]
    """Each layer's."""
    input: int
    """A layer's input, which recomputation keeps instead."""
    outside: int
    """All else."""
    plain_head: bool
    """Whether the output layer is computed in blocks of rows."""


@lru_cache(maxsize=64)
def saved_bytes(
    config: str, tokens: int, longest: int, responses: int, size: int, lora: str = "", ranks: int = 1
) -> SavedBytes:
    """Run a model forward over one row of tokens without memory, and add up what autograd would keep.

    Args:
        config: the model's, as JSON.
        tokens: of the row that this rank has.
        longest: tokens of each of the row's samples; attention without a kernel of its own keeps their square.
        responses: positions that logits are computed at.
        size: bytes of a number that is computed with.
        lora: the adapters, as JSON; empty: all parameters are trained.
        ranks: have as many tokens of the row each, and in attention all tokens of a share of the heads.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype = torch.bfloat16 if size == 2 else torch.float32
    raw: Mapping[str, object] = json.loads(config)
    with torch.random.fork_rng(devices=[]):
        model = build_hf_model(raw, attention=register_packed_attention())
        if lora:
            add_adapters(model, LoraSpec.model_validate_json(lora), dtype, "the model")
        else:
            model.to(dtype)
        with FakeTensorMode() as mode:
            model._apply(_without_memory(mode.from_tensor))
            row = torch.zeros((1, tokens), dtype=torch.int64)
            bounds = [*range(0, tokens * ranks, longest), tokens * ranks]
            group = cast("dist.ProcessGroup", _Unheard(ranks)) if ranks > 1 else None
            return _Walk(model).run(row, responses, bounds, group)


class _Unheard:
    """The first of a row's ranks without the others: what it would get in an exchange is as large as what it gives.

    In the place of a process group, which takes processes.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        """Ranks of the row."""
        return self._ranks

    def rank(self) -> int:
        """The first."""
        return 0

    def alltoall_base(self, *_given: object) -> None:
        """Nothing: tensors have no memory."""


def _without_memory(fake: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else fake(tensor)


class _Walk:
    """Adds up saved storages, each once, by the layer that was first to save it."""

    def __init__(self, model: HfModel) -> None:
        self._model = model
        self._own = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._kept: dict[int, Tensor] = {}
        self._total = 0
        self._layers: list[int] = []
        self._before = self._input = 0

    def run(
        self, row: Tensor, responses: int, bounds: list[int], context_group: dist.ProcessGroup | None
    ) -> SavedBytes:
        def enter(_layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._before, self._input = self._total, args[0].nbytes

        def leave(_layer: nn.Module, _args: object, _result: object) -> None:
            self._layers.append(self._total - self._before)

        def select(_head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (args[0][:, :responses], *args[1:])

        for layer in self._model.get_decoder().layers:
            layer.register_forward_pre_hook(enter)
            layer.register_forward_hook(leave)
        self._model.get_output_embeddings().register_forward_pre_hook(select)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            if has_packed_attention(self._model):
                self._model(
                    input_ids=row,
                    position_ids=row,
                    use_cache=False,
                    row_bounds=bounds,
                    context_group=context_group,
                )
            else:
                self._model(input_ids=row, position_ids=row, use_cache=False)
        return SavedBytes(tuple(self._layers), self._input, self._total - sum(self._layers), plain_head(self._model))

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = storage_of(tensor)
        if storage not in self._own and storage not in self._kept:
            self._kept[storage] = tensor
            self._total += tensor.untyped_storage().nbytes()
        return tensor
