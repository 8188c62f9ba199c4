from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_cases import Weights, model_weights, pieces_for, plan_for

from rljob_worker.tensor_slice import TensorSlice
from rljob_worker.weightsync.plan import SyncPlan, _evenest, build_plan, engine_module, slot_bytes
from rljob_worker.weightsync.trainer import HeldPieces


def moe_shapes(layers: int, experts: int, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    manifest: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (64, hidden))]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        manifest += [(f"{prefix}self_attn.{p}_proj.weight", (hidden, hidden)) for p in "qkvo"]
        manifest += [(f"{prefix}self_attn.{p}_proj.bias", (hidden,)) for p in "qkv"]
        for expert in range(experts):
            manifest += [(f"{prefix}mlp.experts.{expert}.{p}_proj.weight", (8, hidden)) for p in ("gate", "up", "down")]
    return manifest


@given(
    layers=st.integers(1, 4),
    experts=st.integers(1, 6),
    hidden=st.sampled_from([3, 16, 40]),
    bucket_bytes=st.integers(1, 200_000),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    data=st.data(),
)
@settings(max_examples=60)
def test_buckets_hold_whole_modules_once_and_without_overlap(
    layers: int, experts: int, hidden: int, bucket_bytes: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    manifest = moe_shapes(layers, experts, hidden)
    shuffled = data.draw(st.permutations(manifest))
    whole = [TensorSlice(name, shape, None, 0, 0) for name, shape in manifest]
    plan = build_plan(shuffled, {0: whole}, dtype=dtype, engines=1, bucket_bytes=bucket_bytes)

    assert sorted(plan.names) == sorted(name for name, _ in manifest)
    assert plan.nbytes == sum(math.prod(shape) for _, shape in manifest) * dtype.itemsize
    bucket_of: dict[str, int] = {}
    for bucket in plan.buckets:
        end = 0
        for tensor in bucket.tensors:
            assert tensor.offset % 64 == 0
            assert tensor.offset >= end
            end = tensor.offset + tensor.nbytes
            assert bucket_of.setdefault(engine_module(tensor.name), bucket.index) == bucket.index
        assert end <= bucket.nbytes <= plan.slot_bytes
        if len({engine_module(tensor.name) for tensor in bucket.tensors}) > 1:
            assert bucket.nbytes <= max(bucket_bytes, 4 * 2**20)


@given(
    trainers=st.integers(1, 5),
    bucket_bytes=st.integers(1, 40_000),
    slice_bytes=st.none() | st.integers(1, 5000),
    seed=st.integers(0, 3),
)
@settings(max_examples=60)
def test_pieces_put_together_are_the_tensors(
    trainers: int, bucket_bytes: int, slice_bytes: int | None, seed: int
) -> None:
    weights = model_weights(seed)
    plan = plan_for(weights, trainers=trainers, bucket_bytes=bucket_bytes, slice_bytes=slice_bytes)
    ranks = {rank: HeldPieces(rank, pieces, plan) for rank, pieces in pieces_for(weights, trainers).items()}
    assembled: Weights = {}
    for bucket in plan.buckets:
        for tensor in bucket.tensors:
            target = torch.full(tensor.shape, math.nan, dtype=torch.bfloat16)
            for piece in tensor.pieces:
                piece.part.of(target).copy_(ranks[piece.trainer].read(tensor, piece))
            assert not target.isnan().any()
            assembled[tensor.name] = torch.cat([assembled.get(tensor.name, target[:0]), target])
            assert tensor.nbytes == target.nbytes
        assert len({tensor.name for tensor in bucket.tensors}) == len(bucket.tensors)
        if slice_bytes is not None:
            assert bucket.nbytes <= slice_bytes or [tensor.shape[0] for tensor in bucket.tensors] == [1]
    assert list(assembled) == list(plan.names) == list(weights)
    assert all(torch.equal(assembled[name], weight) for name, weight in weights.items())
    assert plan.shapes == {name: tuple(weight.shape) for name, weight in weights.items()}
    assert plan.nbytes == sum(weight.nbytes for weight in weights.values())
    manifest = [(name, tuple(weight.shape)) for name, weight in weights.items()]
    expected = slot_bytes(manifest, dtype=torch.bfloat16, bucket_bytes=bucket_bytes, slice_bytes=slice_bytes)
    assert plan.slot_bytes == expected


def test_plan_survives_json_and_says_when_it_differs() -> None:
    plan = plan_for(model_weights(0), trainers=2, engines=2)
    again = SyncPlan.from_json(plan.to_json())
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert plan_for(model_weights(0), trainers=2, engines=1).fingerprint != plan.fingerprint
    assert plan_for(model_weights(0), trainers=1, engines=2).fingerprint != plan.fingerprint


def test_what_all_ranks_hold_is_shared_out() -> None:
    names = [f"model.layers.{i}.input_layernorm.weight" for i in range(8)]
    pieces = {rank: [TensorSlice(name, (64,), None, 0, 0) for name in names] for rank in (3, 5)}
    plan = build_plan([(name, (64,)) for name in names], pieces, dtype=torch.float32, engines=1)
    senders = [piece.trainer for bucket in plan.buckets for tensor in bucket.tensors for piece in tensor.pieces]
    assert senders.count(3) == senders.count(5) == 4


def test_small_models_get_several_buckets() -> None:
    manifest = [(f"model.layers.{i}.mlp.down_proj.weight", (1024, 1024)) for i in range(32)]
    whole = [TensorSlice(name, shape, None, 0, 0) for name, shape in manifest]
    plan = build_plan(manifest, {0: whole}, dtype=torch.float32, engines=1)
    assert len(plan.buckets) >= 8


def test_buckets_are_as_even_as_so_few_can_be() -> None:
    """Filled to the brim, eight of the nine would hold ten of the matrices, and the last would hold one."""
    manifest = [(f"model.layers.{i}.mlp.down_proj.weight", (1024, 2048)) for i in range(81)]
    whole = [TensorSlice(name, shape, None, 0, 0) for name, shape in manifest]
    plan = build_plan(manifest, {0: whole}, dtype=torch.bfloat16, engines=1)
    assert [len(bucket.tensors) for bucket in plan.buckets] == [9] * 9


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=40), target=st.integers(1, 250))
def test_even_buckets_are_no_more_than_full_ones(sizes: list[int], target: int) -> None:
    def buckets(most: int) -> list[list[int]]:
        made: list[list[int]] = []
        for size in sizes:
            if not made or sum(made[-1]) + size > most:
                made.append([])
            made[-1].append(size)
        return made

    even = _evenest(sizes, target)
    assert even <= target
    assert len(buckets(even)) == len(buckets(target))
    assert even == 1 or len(buckets(even - 1)) > len(buckets(target))


def test_a_module_larger_than_a_bucket_gets_a_larger_slot() -> None:
    plan = plan_for(model_weights(0), bucket_bytes=64)
    assert plan.slot_bytes >= max(tensor.nbytes for bucket in plan.buckets for tensor in bucket.tensors)


NAME = "model.layers.0.mlp.down_proj.weight"


def geometry(dim: int | None, start: int, length: int) -> TensorSlice:
    return TensorSlice(NAME, (8, 6), dim, start, length)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({0: []}, "no rank sends it"),
        ({0: [geometry(0, 0, 4)]}, "cover 4 of 8"),
        ({0: [geometry(0, 0, 4)], 1: [geometry(0, 5, 3)]}, "exactly once"),
        ({0: [geometry(0, 0, 5)], 1: [geometry(0, 4, 4)]}, "exactly once"),
        ({0: [geometry(0, 0, 8)], 1: [geometry(0, 8, 2)]}, "cover 10 of 8"),
        ({0: [geometry(0, 0, 8)], 1: [geometry(1, 0, 6)]}, "different or impossible"),
        ({0: [geometry(None, 0, 0)], 1: [geometry(0, 0, 8)]}, "different or impossible"),
        ({0: [geometry(2, 0, 8)]}, "different or impossible"),
        ({0: [replace(geometry(None, 0, 0), hf_shape=(6, 8))]}, "takes its shape"),
        ({0: [replace(geometry(None, 0, 0), hf_name="other.weight")]}, "other.weight, which is not a tensor"),
    ],
)
def test_pieces_that_do_not_make_the_tensors_are_refused(pieces: dict[int, list[TensorSlice]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_plan([(NAME, (8, 6))], pieces, dtype=torch.float32, engines=1)


def test_a_tensor_named_twice_is_refused() -> None:
    weights: Weights = model_weights(0)
    manifest = [(name, tuple(tensor.shape)) for name, tensor in weights.items()]
    with pytest.raises(ValueError, match="names a tensor twice"):
        build_plan([*manifest, manifest[3]], pieces_for(weights, 1), dtype=torch.bfloat16, engines=1)
