"""Syncs without slots: engines copy from the trainers' own parameters."""

from __future__ import annotations

import json
import math
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peers import Peers, ProcessPeer, receiver_process, sender_process, threaded_peers
from separate_devices import SeparateDevice
from sync_cases import KeepingEngine, in_shared_pages, model_weights, pieces_for, plan_for

from rljob_api.spec import RLJobSpec, WeightTransport
from rljob_worker.devices import shared_pages
from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.errors import UserError, WeightSyncError
from rljob_worker.memory.sleeping import shareable
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.tensor_slice import Part
from rljob_worker.trainer.weight_sender import WeightSender
from rljob_worker.weightsync.in_place import InPlaceReceiver, _blocks, _shared
from rljob_worker.weightsync.meeting import HostParties
from rljob_worker.weightsync.plan import Bucket
from rljob_worker.weightsync.routes import HostRoute, InPlaceRoute, host_route, route_from
from rljob_worker.weightsync.trainer import HeldPieces, WeightSyncTrainer


def failed_everywhere(peers: Peers, outcomes: dict[str, Any], *messages: str) -> None:
    assert all(isinstance(outcome, WeightSyncError) for outcome in outcomes.values()), outcomes
    assert all(receiver.version is None for receiver in peers.receivers)
    assert all(message in str(outcome) for outcome in outcomes.values() for message in messages), outcomes


@pytest.mark.parametrize(("trainers", "engines"), [(1, 1), (2, 2), (3, 1)])
def test_every_engine_gets_every_tensor_and_nothing_is_between(trainers: int, engines: int) -> None:
    with threaded_peers(trainers, [KeepingEngine() for _ in range(engines)], in_place=True) as peers:
        for version in (1, 2):
            for tensor in peers.weights.values():
                tensor.add_(1)
            outcomes = peers.sync(version)
            assert peers.landed_right(), outcomes
            assert [receiver.version for receiver in peers.receivers] == [version] * engines
        sent = [outcomes[f"trainer-{rank}"] for rank in range(trainers)]
        assert sum(report["bytes"] for report in sent) == sum(tensor.nbytes for tensor in peers.weights.values())
        assert [report["staging_bytes"] for report in sent] == [0] * trainers
        assert outcomes["engine-0"]["verified"] is True


def test_the_memory_is_opened_once() -> None:
    with threaded_peers(2, [KeepingEngine()], in_place=True) as peers:
        peers.sync_without_growth(24)


def test_a_bit_that_is_flipped_in_a_parameter_meanwhile_is_found() -> None:
    flip = [True]

    def damage(bucket: Bucket, _slots: Any) -> None:
        if bucket.index == 3 and flip:
            peers.weights[name].view(torch.uint8).view(-1)[7] ^= 16
            flip.clear()

    with threaded_peers(2, [KeepingEngine(), KeepingEngine(damage)], in_place=True) as peers:
        name = peers.senders[0].plan.buckets[3].tensors[-1].name
        # Both engines read the one memory: one or both see it.
        outcomes = peers.sync(1)
        failed_everywhere(peers, outcomes, "version 1")
        assert any("bucket 3" in str(outcome) and "checksum" in str(outcome) for outcome in outcomes.values())
        peers.sync(2)
        assert peers.landed_right()


def test_an_engine_that_lands_other_values_is_told_the_tensor() -> None:
    class Wrong(KeepingEngine):
        def rljob_land_bucket(self, message: dict[str, Any]) -> dict[str, Any]:
            report = super().rljob_land_bucket(message)
            if message["bucket"] == 2:
                report["checksums"][-1] ^= 1
                report["digests"] = [digest ^ 1 for digest in report["digests"]]
            return report

    with threaded_peers(1, [Wrong()], in_place=True) as peers:
        name = peers.senders[0].plan.buckets[2].tensors[-1].name
        failed_everywhere(peers, peers.sync(1), "bucket 2", name, "checksum")


def test_a_parameter_that_moves_out_of_the_shared_memory_fails_the_sync() -> None:
    with threaded_peers(1, [KeepingEngine()], in_place=True) as peers:
        peers.sync(1)
        moved = peers.weights["lm_head.weight"]
        moved.data = moved.data.clone()
        failed_everywhere(peers, peers.sync(2), "trainer-0: a parameter has moved")


def test_a_parameter_in_other_memory_is_named() -> None:
    weights = in_shared_pages(model_weights(0))
    weights["model.layers.1.input_layernorm.weight"] = torch.ones(32, dtype=torch.bfloat16)
    with (
        pytest.raises(WeightSyncError, match=r"model\.layers\.1\.input_layernorm\.weight: share: "),
        threaded_peers(1, [KeepingEngine()], weights, pieces=pieces_for(weights, 1), in_place=True),
    ):
        pass


def test_a_piece_that_is_computed_is_named(tmp_path: Path) -> None:
    weights = in_shared_pages(model_weights(0))

    class Computed:
        view = None

        def __init__(self, piece: Any) -> None:
            self.place, self.read, self.address = piece.place, piece.read, piece.address

    pieces: list[Any] = [*pieces_for(weights, 1)[0]]
    pieces[4] = Computed(pieces[4])
    with pytest.raises(WeightSyncError, match=f"{pieces[4].place.hf_name}: it is no view"):
        WeightSyncTrainer(pieces, plan_for(weights), trainer=0, route=InPlaceRoute(str(tmp_path)))


def test_a_parameter_in_another_format_fails_the_sync() -> None:
    held = in_shared_pages(model_weights(0, dtype=torch.float32))
    weights = {name: tensor.bfloat16() for name, tensor in held.items()}
    with threaded_peers(1, [KeepingEngine()], weights, pieces=pieces_for(held, 1), in_place=True) as peers:
        failed_everywhere(peers, peers.sync(1), "torch.float32", "torch.bfloat16")


def test_a_route_is_read_as_the_one_that_it_was() -> None:
    route = InPlaceRoute("/tmp/a")
    assert route_from(route.to_json()) == route
    assert type(route_from(route.to_json())) is InPlaceRoute


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine", "trainer"])
def test_a_killed_peer_ends_the_sync_of_the_others(victim: str) -> None:
    with tempfile.TemporaryDirectory(prefix="rljob-test-") as folder:
        route = InPlaceRoute(folder)
        trainers = [ProcessPeer(sender_process, route, rank, 2, 1) for rank in range(2)]
        engine = ProcessPeer(receiver_process, route, 0, 4 if victim == "engine" else None)
        everybody = [*trainers, engine]
        try:
            assert [peer.outcome(60) for peer in everybody] == ["up"] * 3
            left = everybody
            if victim == "trainer":
                for peer in everybody:
                    peer.start(1, 20.0)
                assert [peer.outcome(60)[0] for peer in trainers] == ["ok"] * 2
                assert engine.outcome(60) == ("ok", (1, [1.0]))
                trainers[1].kill()
                left = [trainers[0], engine]
            for peer in left:
                peer.start(2, 2.0)
            outcomes = [peer.outcome(60) for peer in left if peer is not engine or victim == "trainer"]
            assert {kind for kind, _ in outcomes} == {"WeightSyncError"}, outcomes
            missing = "trainer-1" if victim == "trainer" else "engine-0"
            assert any("deadline passed while waiting for" in text and missing in text for _, text in outcomes)
        finally:
            for peer in everybody:
                peer.stop()


# --- memory that is shared


def test_memory_is_shared_to_be_read_and_goes_with_its_tensor() -> None:
    device = CpuDevice()
    with shareable(device, None):
        tensor = torch.arange(1000, dtype=torch.float32) + 0.0
    message = device.share(tensor)
    opened = device.open_shared(message)
    assert torch.equal(opened.view(torch.float32), tensor)
    tensor[3] = 7.0
    assert opened.view(torch.float32)[3] == 7.0
    address = tensor.data_ptr()
    assert address in shared_pages._made
    del tensor
    assert address not in shared_pages._made
    assert opened.view(torch.float32)[3] == 7.0, "what is open stays"
    with pytest.raises(ValueError, match="open_shared: "):
        device.open_shared(message)


@pytest.mark.parametrize("tensor", [torch.ones(4), torch.ones(0)], ids=["ordinary", "empty"])
def test_other_memory_is_not_shared(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="made to be shared"):
        CpuDevice().share(tensor)


# --- parts of pieces


@given(st.data())
def test_blocks_of_a_part_make_that_part(data: st.DataObject) -> None:
    """Pieces may have their rows in groups."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    columns, rows = data.draw(st.integers(1, 5)), math.prod(sizes)
    piece = torch.arange(rows * columns).view(*sizes, columns)
    dim = data.draw(st.sampled_from([None, 0, 1]))
    size = rows if dim == 0 else columns
    start = data.draw(st.integers(0, size - 1))
    part = Part() if dim is None else Part(dim, start, data.draw(st.integers(1, size - start)))
    expected = part.of(piece.view(rows, columns))
    target = torch.zeros_like(expected)
    for source, at in _blocks(piece, part, target):
        at.copy_(source)
    assert torch.equal(target, expected)


@given(st.data())
def test_an_overlap_is_the_same_elements_in_both_parts(data: st.DataObject) -> None:
    whole = torch.arange(7 * 6).view(7, 6)

    def part() -> Part:
        dim = data.draw(st.sampled_from([None, 0, 1]))
        if dim is None:
            return Part()
        start = data.draw(st.integers(0, whole.shape[dim] - 1))
        return Part(dim, start, data.draw(st.integers(1, whole.shape[dim] - start)))

    one, other = part(), part()
    if one.misses(other):
        return
    inside, there = one.overlap(other)
    shared = inside.of(one.of(whole))
    assert torch.equal(shared, there.of(other.of(whole)))
    both = set(one.of(whole).flatten().tolist()) & set(other.of(whole).flatten().tolist())
    assert set(shared.flatten().tolist()) == both


# --- devices of their own


def test_a_device_reads_equal_pieces_of_its_own_trainer_alone(tmp_path: Path) -> None:
    """Two data-parallel trainers send some tensors each; each device has all of them."""
    devices = [SeparateDevice(0), SeparateDevice(1)]
    try:
        weights = model_weights(2)
        plan = plan_for(weights, pieces={0: pieces_for(weights, 1)[0], 1: pieces_for(weights, 1)[0]})
        assert plan.trainers == (0, 1)
        parties = HostParties(tmp_path)
        parties.publish(plan, ())
        for rank, device in enumerate(devices):
            own = {name: device.staging(t.nbytes).view(t.dtype).view(t.shape) for name, t in weights.items()}
            for name, tensor in own.items():
                tensor.copy_(weights[name] + rank)
            held = HeldPieces(rank, pieces_for(own, 1)[0], plan)
            shared = _shared(device, rank, plan, held)
            parties.publish_memory(device.identity(), json.dumps(shared))
        for rank, device in enumerate(devices):
            receiver = InPlaceReceiver(parties, device, 0.0)
            for bucket in plan.buckets:
                for tensor in bucket.tensors:
                    found = receiver.arrived.whole(bucket, tensor, plan.torch_dtype)
                    assert torch.equal(found, weights[tensor.name] + rank)
            receiver.close()
    finally:
        for device in devices:
            device.remove_files()


def test_what_the_trainer_of_a_device_does_not_hold_is_on_meta(tmp_path: Path) -> None:
    device = SeparateDevice(0)
    try:
        weights = model_weights(2)
        plan = plan_for(weights, trainers=2)
        parties = HostParties(tmp_path)
        parties.publish(plan, ())
        own = {name: device.staging(t.nbytes).view(t.dtype).view(t.shape).copy_(t) for name, t in weights.items()}
        shared = _shared(device, 0, plan, HeldPieces(0, pieces_for(own, 2)[0], plan))
        parties.publish_memory(device.identity(), json.dumps(shared))
        receiver = InPlaceReceiver(parties, device, 0.0)
        [(bucket, tensor)] = [(b, t) for b in plan.buckets for t in b.tensors if t.name == "lm_head.weight"]
        first, second = receiver.arrived.pieces(bucket, tensor, plan.torch_dtype)
        assert torch.equal(first, weights["lm_head.weight"][:24])
        assert second.is_meta
        receiver.close()
    finally:
        device.remove_files()


def test_every_transport_has_a_route_on_a_host() -> None:
    assert [host_route(transport).__name__ for transport in WeightTransport] == [
        "HostRoute",
        "HostRoute",
        "InPlaceRoute",
    ]


@pytest.mark.parametrize(("fault", "message"), [("computed", "lies in several places"), ("format", "is torch.float32")])
def test_a_trainer_says_at_its_start_what_it_cannot_share(fault: str, message: str, tmp_path: Path) -> None:
    dtype = torch.float32 if fault == "format" else torch.bfloat16
    pieces: list[Any] = list(pieces_for(model_weights(0, dtype=dtype), 1)[0])
    if fault == "computed":
        pieces[2] = SimpleNamespace(hf_name=pieces[2].hf_name, view=None)
    backend: Any = SimpleNamespace(layout=ParallelLayout(), pieces=lambda _layout: pieces, sync_dtype=torch.bfloat16)
    spec = RLJobSpec.model_validate(
        {
            "steps": 1,
            "model": {"random": {"config": {}}},
            "data": {"synthetic": {}},
            "rollout": {"promptsPerStep": 2, "samplesPerPrompt": 4, "maxResponseTokens": 4},
            "weightSync": {"transport": "InPlace"},
            "resources": {"profile": "cpu"},
        }
    )
    name = pieces[2 if fault == "computed" else 0].hf_name
    with pytest.raises(UserError, match=rf"spec\.weightSync\.transport: InPlace: {re.escape(name)} {message}"):
        WeightSender(backend, spec, CpuDevice(), InPlaceRoute(str(tmp_path)))
    WeightSender(backend, spec, CpuDevice(), HostRoute(str(tmp_path)))
