"""Landing in a model of vLLM's kind, without an engine: loaders, packed products, padding, what is tied."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from sync_cases import Weights, pieces_for, plan_for

from rljob_worker.devices import packed_linear
from rljob_worker.errors import WeightSyncError
from rljob_worker.weightsync.messages import BucketReport
from rljob_worker.weightsync.plan import Bucket, PlacedTensor
from rljob_worker.weightsync.protocol import Coverage
from rljob_worker.weightsync.receivers import HostReceiver
from rljob_worker.weightsync.shared_memory import SharedMemory
from rljob_worker.weightsync.slots import Move
from rljob_worker.weightsync.trainer import HeldPieces
from rljob_worker.weightsync.vllm_extension import Landing
from rljob_worker.weightsync.vllm_layout import ModelLayout

HIDDEN, ROWS, VOCABULARY = 64, 128, 60


@functools.cache
def packing() -> type[Any]:
    """Packing as by vLLM on CPU: the weight goes into a packed one that the module multiplies with."""
    # Seconds, which collection would take in each process of a run of the tests.
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Packing(QuantizeMethodBase):
        def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None: ...

        def apply(self, layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise NotImplementedError

        def process_weights_after_loading(self, layer: Any) -> None:
            handler = packed_linear.pack(layer.weight.data)
            layer.cpu_linear = lambda x, weight, bias: packed_linear.multiply(handler, x, bias)
            if layer.removes:
                layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    return Packing


class Linear(torch.nn.Module):
    def __init__(self, rows: int, *, packed: bool, removes: bool = True, padding: int = 0) -> None:
        super().__init__()
        self.removes = removes
        self.weight = torch.nn.Parameter(torch.full((rows + padding, HIDDEN), 9.0), requires_grad=False)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]
        if packed:
            self.quant_method = packing()()

    def load(self, parameter: torch.Tensor, weight: torch.Tensor, start: int = 0) -> None:
        parameter.data.narrow(0, start, len(weight)).copy_(weight)
        if len(parameter) % ROWS:
            parameter.data[len(weight) :].fill_(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cpu_linear(x, self.weight, None) if hasattr(self, "cpu_linear") else x @ self.weight.T


class Model(torch.nn.Module):
    """`gate` and `up` are one parameter of the engine; `head` keeps its weight beside what is packed of it."""

    table_kind = Linear

    def __init__(self, weights: Weights, *, packed: bool = True) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

        super().__init__()
        self.fused = Linear(2 * ROWS, packed=packed)
        self.head = Linear(ROWS, packed=packed, removes=False)
        self.table = self.table_kind(VOCABULARY, packed=False, padding=4)
        record_metadata_for_reloading(self)
        self.load_weights(weights.items())
        for module in (self.fused, self.head):
            if packed:
                module.quant_method.process_weights_after_loading(module)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name in ("fused.gate_proj.weight", "fused.up_proj.weight"):
                self.fused.weight.weight_loader(self.fused.weight, weight, ROWS * ("up" in name))
            elif name in ("head.weight", "table.weight"):
                parameter = getattr(self, name.partition(".")[0]).weight
                parameter.weight_loader(parameter, weight)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.fused(x), self.head(x), self.head.weight, self.table(x), self.table.weight]


def some_weights(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "fused.gate_proj.weight": ROWS,
        "fused.up_proj.weight": ROWS,
        "head.weight": ROWS,
        "table.weight": VOCABULARY,
    }
    return {name: torch.randn(rows, HIDDEN, generator=generator) for name, rows in shapes.items()}


class Sync:
    """Slots that are filled and landed by this one process."""

    def __init__(self, model: Model, weights: Weights, trainers: int = 2, slice_bytes: int | None = None) -> None:
        self.plan = plan_for(weights, trainers=trainers, bucket_bytes=slice_bytes or 1, slice_bytes=slice_bytes)
        self.layout = ModelLayout(model, {name: tuple(w.shape) for name, w in weights.items()}, torch.float32)
        self.slots = SharedMemory.create("landing", self.plan.slot_bytes)
        self.trainers = trainers
        self.buckets = range(len(self.plan.buckets))

    def update(self, weights: Weights, *, damage: str = "") -> None:
        landing = Landing(self.layout, self.plan, HostReceiver(self.slots), 1)
        ranks = {rank: HeldPieces(rank, held, self.plan) for rank, held in pieces_for(weights, self.trainers).items()}
        for bucket in [self.plan.buckets[index] for index in self.buckets]:
            copies = {
                (tensor, piece): (ranks[piece.trainer].read(tensor, piece), piece.part.of(self.whole(bucket, tensor)))
                for tensor in bucket.tensors
                for piece in tensor.pieces
            }
            groups = self.plan.groups[bucket.index]
            digests = [self.slots.filling([copies[placed] for placed in group.pieces]).run() for group in groups]
            for tensor in bucket.tensors:
                if tensor.name == damage and tensor.first + tensor.shape[0] == self.plan.shapes[damage][0]:
                    self.whole(bucket, tensor)[-1, -1] += 1
            report = landing.land({"version": 1, "bucket": bucket.index, "digests": digests})
            coverage = Coverage(self.plan, 1)
            # What this worker has no part of, another one takes.
            other: BucketReport = {**report, "untaken": [], "digests": [None] * len(digests)}
            for doubt in coverage.landed(bucket, digests, [report, other]):
                theirs = [self.slots.landing([Move(None, None, source)]).run() for source, _ in copies.values()]
                known = dict(zip(copies, theirs, strict=True))
                own = [known[placed] for placed in bucket.pieces_of(doubt.group.trainer)]
                raise WeightSyncError(coverage.name(bucket, doubt, own, report["checksums"]))
        landing.finish(list(self.plan.names), None)

    def whole(self, bucket: Bucket, tensor: PlacedTensor) -> torch.Tensor:
        return self.slots.tensor(bucket.index % 2, tensor.offset, torch.float32, tensor.shape)


# No slices; some of each tensor; a row of each, though a row does not fit.
@pytest.mark.parametrize("slice_bytes", [None, 9000, 1])
@pytest.mark.parametrize("packed", [True, False])
def test_a_model_computes_after_each_sync_what_a_fresh_one_does(packed: bool, slice_bytes: int | None) -> None:
    model = Model(some_weights(0), packed=packed)
    sync = Sync(model, some_weights(0), slice_bytes=slice_bytes)
    x = torch.randn(5, HIDDEN)
    addresses = []
    try:
        for seed in (1, 2, 3):
            sync.update(some_weights(seed))
            fresh = Model(some_weights(seed), packed=packed)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(model(x), fresh(x), strict=True))
            assert model.fused.weight.numel() == fresh.fused.weight.numel()
            addresses.append(
                [id(model.fused.weight), model.head.weight.data_ptr(), id(model.fused.__dict__.get("cpu_linear"))]
            )
        assert addresses[1] == addresses[2], "the third sync writes where the second did"
        assert sync.layout.holds(model)
    finally:
        sync.slots.close()


def test_a_layout_does_not_hold_once_a_parameter_that_is_written_in_place_has_moved() -> None:
    model = Model(some_weights(0), packed=False)
    sync = Sync(model, some_weights(0))
    try:
        sync.update(some_weights(1))
        assert sync.layout.kept, "the next sync would write where this one did"
        assert sync.layout.holds(model)
        model.head.weight.data = model.head.weight.data.clone()
        assert not sync.layout.holds(model)
    finally:
        sync.slots.close()


def test_what_is_packed_lands_right_in_other_scratch_memory_than_the_sync_before_had() -> None:
    model = Model(some_weights(0))
    sync = Sync(model, some_weights(0))
    x = torch.randn(5, HIDDEN)
    try:
        sync.update(some_weights(1))
        sync.layout.scratch.drop()
        sync.update(some_weights(2))
        fresh = Model(some_weights(2))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(model(x), fresh(x), strict=True))
    finally:
        sync.slots.close()


@pytest.mark.parametrize("slice_bytes", [None, 9000])
@pytest.mark.parametrize("name", ["fused.gate_proj.weight", "head.weight", "table.weight"])
def test_a_bit_that_is_wrong_is_refused_and_the_next_sync_is_right(name: str, slice_bytes: int | None) -> None:
    model = Model(some_weights(0))
    sync = Sync(model, some_weights(0), slice_bytes=slice_bytes)
    try:
        for seed in (1, 2):
            with pytest.raises(WeightSyncError, match=f"{name}.*checksum"):
                sync.update(some_weights(seed), damage=name)
            sync.layout.place_back()
            sync.update(some_weights(seed + 5))
            x = torch.randn(5, HIDDEN)
            fresh = Model(some_weights(seed + 5))
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(model(x), fresh(x), strict=True))
    finally:
        sync.slots.close()


class InterleavedTable(Linear):
    """Has the checkpoint's even rows before the odd ones."""

    def load(self, parameter: torch.Tensor, weight: torch.Tensor, start: int = 0) -> None:
        half = len(weight) // 2
        parameter.data[:half].copy_(weight[::2])
        parameter.data[half : len(weight)].copy_(weight[1::2])
        parameter.data[len(weight) :].fill_(0)


class ShardOfTable(Linear):
    """Some rows of the checkpoint's, as on a worker of a tensor-parallel engine."""

    def load(self, parameter: torch.Tensor, weight: torch.Tensor, start: int = 0) -> None:
        parameter.data[:31].copy_(weight[17:48])
        parameter.data[31:].fill_(0)


class Sharded(Model):
    table_kind = ShardOfTable


@pytest.mark.parametrize(("trainers", "slice_bytes"), [(1, None), (1, 2000), (2, 2000), (3, 1)])
def test_a_shard_gets_its_rows_from_slices_that_begin_elsewhere(trainers: int, slice_bytes: int | None) -> None:
    model = Sharded(some_weights(0))
    sync = Sync(model, some_weights(0), trainers, slice_bytes)
    x = torch.randn(5, HIDDEN)
    try:
        sync.update(some_weights(1))
        fresh = Sharded(some_weights(1))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(model(x), fresh(x), strict=True))
    finally:
        sync.slots.close()


class Interleaved(Model):
    table_kind = InterleavedTable


@pytest.mark.parametrize("slice_bytes", [None, 5000])
def test_rows_that_go_to_several_places_wait_for_the_whole_tensor(slice_bytes: int | None) -> None:
    model = Interleaved(some_weights(0))
    sync = Sync(model, some_weights(0), slice_bytes=slice_bytes)
    assert sync.layout.taken["table.weight"] is None
    x = torch.randn(5, HIDDEN)
    try:
        with pytest.raises(WeightSyncError, match=r"table\.weight.*checksum"):
            sync.update(some_weights(1), damage="table.weight")
        sync.layout.place_back()
        for seed in (2, 3):
            sync.update(some_weights(seed))
            fresh = Interleaved(some_weights(seed))
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(model(x), fresh(x), strict=True))
    finally:
        sync.slots.close()


@pytest.mark.parametrize("fault", ["lost", "twice", "swapped"])
def test_slices_that_are_lost_or_out_of_order_are_refused(fault: str) -> None:
    model = Model(some_weights(0))
    sync = Sync(model, some_weights(0), slice_bytes=9000)
    order = list(range(len(sync.plan.buckets)))
    sync.buckets = {"lost": order[:-1], "twice": [*order, order[-1]], "swapped": [1, 0, *order[2:]]}[fault]
    try:
        with pytest.raises(WeightSyncError, match="3 of 4 tensors have landed" if fault == "lost" else "came after"):
            sync.update(some_weights(1))
    finally:
        sync.slots.close()


def test_a_loader_that_does_more_than_copy_and_a_tensor_too_few_or_many_are_refused() -> None:
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    weights = some_weights(0)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    x = torch.randn(5, HIDDEN)
    model, expected = Model(weights), Model(weights)(x)
    for wrong, message in (
        ({k: v for k, v in shapes.items() if "up" not in k}, "fused got 8192 of its 16384 elements"),
        ({k: v for k, v in shapes.items() if k != "head.weight"}, "head.weight was not loaded"),
        (shapes | {"other.weight": (4, 4)}, "no parameter for other.weight"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            ModelLayout(model, wrong, torch.float32)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(model(x), expected, strict=True))

    def doubling(parameter: torch.Tensor, weight: torch.Tensor) -> None:
        parameter.data.copy_(weight * 2)

    other = Model(weights, packed=False)
    other.head.weight.weight_loader = doubling  # type: ignore[attr-defined]
    record_metadata_for_reloading(other)
    with pytest.raises(WeightSyncError, match=r"head\.weight does more than copy"):
        ModelLayout(other, shapes, torch.float32)
