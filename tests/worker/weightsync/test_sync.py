from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import Peers, ProcessPeer, receiver_process, sender_process, threaded_peers
from support import qwen3_5
from sync_cases import KeepingEngine, TensorPiece, cut_dim, model_weights, pieces_for, plan_for

from rljob_worker.errors import WeightSyncError
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.manifest import hf_manifest
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.tensor_slice import Piece
from rljob_worker.trainer.megatron.models import convert
from rljob_worker.weightsync.engine import WeightSyncEngine
from rljob_worker.weightsync.messages import Failure
from rljob_worker.weightsync.plan import Bucket
from rljob_worker.weightsync.protocol import FILLED
from rljob_worker.weightsync.routes import HostRoute
from rljob_worker.weightsync.shared_memory import SHARED_MEMORY, SharedMemory
from rljob_worker.weightsync.slots import SLOT_COUNT
from rljob_worker.weightsync.trainer import WeightSyncTrainer


def failed_everywhere(peers: Peers, outcomes: dict[str, Any], *messages: str) -> None:
    assert all(isinstance(outcome, WeightSyncError) for outcome in outcomes.values()), outcomes
    assert all(receiver.version is None for receiver in peers.receivers)
    for outcome in outcomes.values():
        for message in messages:
            assert message in str(outcome)


@pytest.mark.parametrize(
    ("trainers", "engines", "slice_bytes"), [(1, 1, None), (2, 2, None), (3, 1, None), (1, 1, 1500), (3, 2, 1500)]
)
def test_every_engine_gets_every_tensor(trainers: int, engines: int, slice_bytes: int | None) -> None:
    with threaded_peers(trainers, [KeepingEngine() for _ in range(engines)], slice_bytes=slice_bytes) as peers:
        outcomes = peers.sync(5)
        assert peers.landed_right()
        assert [receiver.version for receiver in peers.receivers] == [5] * engines
        total = sum(tensor.nbytes for tensor in peers.weights.values())
        sent = [outcomes[f"trainer-{rank}"] for rank in range(trainers)]
        assert sum(report["bytes"] for report in sent) == total
        received = outcomes["engine-0"]
        assert received["bytes"] == total
        assert received["tensors"] == len(peers.weights)
        assert received["verified"] is True
        parts = [value for name, value in received.items() if name.endswith("_seconds")]
        assert sum(parts) <= received["seconds"]


@pytest.mark.parametrize(("trainers", "slice_bytes"), [(1, None), (2, 1500)])
def test_what_trainers_hold_in_another_format_arrives_rounded(trainers: int, slice_bytes: int | None) -> None:
    held = model_weights(0, dtype=torch.float32)
    weights = {name: tensor.bfloat16() for name, tensor in held.items()}
    with threaded_peers(trainers, [KeepingEngine()], weights, slice_bytes, pieces_for(held, trainers)) as peers:
        outcomes = peers.sync(1)
        assert peers.landed_right(), outcomes
        sent = sum(outcomes[f"trainer-{rank}"]["bytes"] for rank in range(trainers))
        assert sent == sum(tensor.nbytes for tensor in weights.values())


@pytest.mark.parametrize(("trainers", "slice_bytes"), [(1, None), (1, 1500), (2, None), (2, 1500)])
def test_what_megatron_holds_of_a_hybrid_model_arrives(trainers: int, slice_bytes: int | None) -> None:
    """Queries beside their gates, and q, k and v of a linear attention: in several places of one parameter."""
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    cfg = ModelConfig.from_hf(qwen3_5.config(**kinds, vocab_size=48))
    generator = torch.Generator().manual_seed(2)
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in hf_manifest(cfg)}
    pieces = {
        at.rank: [piece for piece in megatron_pieces(cfg, at, weights) if piece.primary]
        for at in ParallelLayout(trainers, trainers).every_rank()
    }
    with threaded_peers(trainers, [KeepingEngine()], weights, slice_bytes, pieces) as peers:
        outcomes = peers.sync(1)
        assert peers.landed_right(), outcomes


def megatron_pieces(cfg: ModelConfig, at: ParallelLayout, weights: dict[str, torch.Tensor]) -> list[Piece]:
    """Pieces of a rank's parameters with these values."""
    linear = [f"self_attention.{name}" for name in ("A_log", "dt_bias", "conv1d.weight", "in_proj.weight")]
    linear += ["self_attention.out_norm.weight", "self_attention.out_proj.weight"]
    full = [f"self_attention.{name}.weight" for name in ("linear_qkv", "linear_proj", "q_layernorm", "k_layernorm")]
    both = ["input_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
    names = [f"decoder.layers.{layer}.{name}" for layer, own in enumerate((linear, full)) for name in own + both]
    names += ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
    parameters = {}
    for name in names:
        layout = convert._layout(name, cfg, at)
        assert layout is not None, name
        parameters[name] = torch.zeros(layout.shape, dtype=torch.bfloat16)
    pieces = convert.local_pieces(parameters, cfg, at)
    for piece in pieces:
        piece.write(piece.part.of(weights[piece.hf_name]))
    return pieces


def test_slots_are_kept_over_syncs_without_growth() -> None:
    engine = KeepingEngine()
    with threaded_peers(2, [engine]) as peers:
        peers.sync_without_growth(40)
        names = [path.name for path in SHARED_MEMORY.glob(f"rljob-rljob.test.*-{os.getpid()}-*-*")]
        assert len(names) == 2
    assert not any((SHARED_MEMORY / name).exists() for name in names)


def test_a_bit_flipped_in_a_slot_fails_the_sync_and_the_next_one_works() -> None:
    flip = [True]

    def damage(bucket: Bucket, slots: SharedMemory) -> None:
        if bucket.index == 3 and flip:
            slots.bytes_of(3 % SLOT_COUNT)[bucket.tensors[-1].offset + 7] ^= 16
            flip.clear()

    with threaded_peers(2, [KeepingEngine(), KeepingEngine(damage)]) as peers:
        name = peers.senders[0].plan.buckets[3].tensors[-1].name
        failed_everywhere(peers, peers.sync(1), "version 1", "bucket 3", name, "checksum")
        peers.sync(2)
        assert [receiver.version for receiver in peers.receivers] == [2, 2]
        assert peers.landed_right()


def test_what_was_found_once_is_found_again_when_a_parameter_has_moved() -> None:
    with threaded_peers(1, [KeepingEngine()]) as peers:
        [sender] = peers.senders
        peers.sync(1)
        first = dict(sender.rank.kept)
        assert list(first) == [bucket.index for bucket in sender.plan.buckets]
        for tensor in peers.weights.values():
            tensor.add_(1)
        peers.sync(2)
        assert peers.landed_right()
        assert all(sender.rank.kept[index] is share for index, share in first.items())
        moved = peers.weights["lm_head.weight"]
        moved.data = moved.data.clone() + 1
        peers.sync(3)
        assert peers.receivers[0].version == 3
        assert peers.landed_right()
        assert all(sender.rank.kept[index] is not share for index, share in first.items())


def test_a_digest_that_differs_though_no_piece_does_still_fails_the_sync() -> None:
    class OtherDigest(KeepingEngine):
        def rljob_land_bucket(self, message: dict[str, Any]) -> dict[str, Any]:
            report = super().rljob_land_bucket(message)
            if message["bucket"] == 2:
                report["digests"][0] ^= 1
            return report

    with threaded_peers(1, [OtherDigest()]) as peers:
        names = ", ".join(tensor.name for tensor in peers.senders[0].plan.buckets[2].tensors)
        failed_everywhere(peers, peers.sync(1), "bucket 2", f"agree: one of {names} was wrong")


def test_a_piece_that_no_worker_takes_fails_the_sync() -> None:
    class PartialEngine(KeepingEngine):
        def rljob_land_bucket(self, message: dict[str, Any]) -> dict[str, Any]:
            return super().rljob_land_bucket(message) | {"untaken": [0] if message["bucket"] == 1 else []}

    with threaded_peers(1, [PartialEngine()]) as peers:
        name = peers.senders[0].plan.buckets[1].tensors[0].name
        failed_everywhere(peers, peers.sync(1), "bucket 1", name, "no worker of the engine took it")


class ForgetfulEngine(KeepingEngine):
    """Changes what it says it gave to the loader."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def rljob_land_bucket(self, message: dict[str, Any]) -> dict[str, Any] | Failure:
        report = super().rljob_land_bucket(message)
        if message["bucket"] == 1:
            first = report["names"][0]
            report["names"] = {
                "drop": report["names"][1:],
                "duplicate": [first, *report["names"]],
                "reorder": report["names"][::-1],
                "raise": report["names"],
            }[self._fault]
            if self._fault == "raise":
                return Failure("no memory")
        return report


@pytest.mark.parametrize("fault", ["drop", "duplicate", "reorder", "raise"])
def test_an_engine_that_lands_something_else_fails_the_sync(fault: str) -> None:
    with threaded_peers(1, [KeepingEngine(), ForgetfulEngine(fault)]) as peers:
        assert len(peers.senders[0].plan.buckets[1].tensors) > 1
        failed_everywhere(
            peers, peers.sync(1), "version 1", "bucket 1", "no memory" if fault == "raise" else "worker 0"
        )


def test_a_finish_that_counts_fewer_tensors_fails_the_sync() -> None:
    class ShortEngine(KeepingEngine):
        def rljob_finish_sync(self, message: dict[str, Any]) -> dict[str, Any]:
            return super().rljob_finish_sync(message) | {"tensors": 1}

    with threaded_peers(1, [ShortEngine()]) as peers:
        failed_everywhere(peers, peers.sync(1), "worker 0 has 1 tensors")


@pytest.mark.parametrize("fault", ["shape", "dtype", "read"])
def test_a_trainer_whose_parameters_are_wrong_fails_the_sync(fault: str) -> None:
    def read() -> torch.Tensor:
        if fault == "read":
            raise RuntimeError("parameter has moved")
        return torch.zeros(3, 3, dtype=torch.bfloat16) if fault == "shape" else torch.zeros(48, 32, dtype=torch.int16)

    class WrongPiece(TensorPiece):
        def read(self) -> torch.Tensor:
            return read()

    weights = model_weights(0)
    plan = plan_for(weights)
    pieces = [*pieces_for(weights, 1)[0][:-1], WrongPiece("lm_head.weight", (48, 32), None, 0, 48, torch.empty(0))]
    with tempfile.TemporaryDirectory(prefix="rljob-test-") as folder:
        sender = WeightSyncTrainer(pieces, plan, trainer=0, route=HostRoute(folder))
        engine = KeepingEngine()
        receiver = WeightSyncEngine(engine, route=HostRoute(folder), engine=0)
        peers = Peers(folder, weights, [sender], [engine], [receiver])
        last = plan.buckets[-1].index
        expected = "parameter has moved" if fault == "read" else "lm_head.weight: the trainer holds"
        failed_everywhere(peers, peers.sync(1), f"bucket {last}", expected)
        for peer in (receiver, engine, sender):
            peer.close()


def test_peers_that_do_not_come_are_named_at_the_deadline() -> None:
    with threaded_peers(2, [KeepingEngine(), KeepingEngine()]) as peers:
        outcomes = peers.sync(1, deadline=0.6, without=("engine-1", "trainer-1"))
        failed_everywhere(peers, outcomes, "deadline passed")
        assert "engine-1" in str(outcomes["trainer-0"])
        assert "trainer-1" in str(outcomes["engine-0"]) or "engine-1" in str(outcomes["engine-0"])
        peers.sync(2)
        assert [receiver.version for receiver in peers.receivers] == [2, 2]


def test_trainers_that_never_start_are_named() -> None:
    with tempfile.TemporaryDirectory(prefix="rljob-test-") as folder:
        receiver = WeightSyncEngine(KeepingEngine(), route=HostRoute(folder), engine=0)
        with pytest.raises(WeightSyncError, match="first sending trainer did not start"):
            receiver.update_weights(1, 0.2)


def test_versions_must_agree_and_grow() -> None:
    with threaded_peers(1, [KeepingEngine()]) as peers:
        peers.sync(1)
        with pytest.raises(ValueError, match="version 1 is not greater than 1"):
            peers.senders[0].update_weights(1, 1.0)
        with pytest.raises(ValueError, match="version 1 is not greater than 1"):
            peers.receivers[0].update_weights(1, 1.0)
        assert peers.receivers[0].version is None


def test_sides_that_disagree_about_the_version_fail() -> None:
    with threaded_peers(1, [KeepingEngine()]) as peers:
        take = peers.receivers[0].update_weights
        peers.receivers[0].update_weights = lambda version, deadline: take(version + 1, deadline)  # type: ignore[method-assign]
        failed_everywhere(peers, peers.sync(1, deadline=0.6), "deadline passed")


def test_what_an_aborted_sync_left_behind_is_ignored() -> None:
    with threaded_peers(1, [KeepingEngine()]) as peers:
        sender = peers.senders[0]
        # Only the trainer takes part in sync 1: its abort waits in the engine's inbox.
        outcomes = peers.sync(1, deadline=0.3, without=("engine-0",))
        assert "engine-0" in str(outcomes["trainer-0"])
        # A bucket of that sync arrives late, with other contents.
        sender.end.mailbox.send(["engine-0"], FILLED, 1, version=1, plan=sender.plan.fingerprint, bucket=0, digests=[])
        peers.sync(2)
        assert peers.receivers[0].version == 2
        assert peers.landed_right()


def test_an_impostor_that_fills_twice_fails_the_sync() -> None:
    with threaded_peers(1, [KeepingEngine()]) as peers:
        sender = peers.senders[0]
        original = sender.end.mailbox.send

        def twice(to: Any, kind: str, sync: int, **body: Any) -> None:
            original(to, kind, sync, **body)
            if kind == FILLED and body["bucket"] == 1:
                original(to, kind, sync, **body)

        sender.end.mailbox.send = twice  # type: ignore[method-assign]
        failed_everywhere(peers, peers.sync(1), "filled bucket 1, expected bucket 2")


def test_an_engine_number_outside_the_plan_is_refused() -> None:
    with threaded_peers(1, [KeepingEngine()]) as peers:
        stranger = WeightSyncEngine(KeepingEngine(), route=HostRoute(peers.folder), engine=1)
        with pytest.raises(WeightSyncError, match="engine 1 is not among the plan's 1"):
            stranger.update_weights(1, 1.0)


def test_a_sender_without_its_pieces_is_refused(tmp_path: Path) -> None:
    weights = model_weights(0)
    with pytest.raises(ValueError, match=r"has to send lm_head\.weight"):
        WeightSyncTrainer(pieces_for(weights, 1)[0][:-1], plan_for(weights), trainer=0, route=HostRoute(str(tmp_path)))


def test_a_rank_with_nothing_to_send_returns_at_once(tmp_path: Path) -> None:
    sender = WeightSyncTrainer([], plan_for(model_weights(0)), trainer=9, route=HostRoute(str(tmp_path)))
    assert sender.update_weights(1, 1.0)["bytes"] == 0
    sender.close()
    assert not list(tmp_path.iterdir())


def test_pieces_cut_by_columns_are_among_the_cases() -> None:
    assert {cut_dim(name) for name in model_weights(0)} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine", "trainer"])
def test_a_killed_peer_ends_the_sync_of_the_others_within_the_deadline(victim: str) -> None:
    with tempfile.TemporaryDirectory(prefix="rljob-test-") as folder:
        trainers = [ProcessPeer(sender_process, HostRoute(folder), rank, 2, 2) for rank in range(2)]
        engines = [
            ProcessPeer(receiver_process, HostRoute(folder), i, 4 if victim == "engine" and i == 1 else None)
            for i in range(2)
        ]
        everybody = [*trainers, *engines]
        try:
            for peer in everybody:
                assert peer.outcome(60) == "up"
            if victim == "trainer":
                for peer in everybody:
                    peer.start(1, 20.0)
                assert trainers[0].outcome(30)[0] == "ok"
                assert [engine.outcome(30) for engine in engines] == [("ok", (1, [1.0]))] * 2
                assert trainers[1].outcome(30)[0] == "ok"
                trainers[1].kill()
            left = [*trainers[:1], *engines] if victim == "trainer" else [*trainers, engines[0]]
            for peer in left if victim == "trainer" else everybody:
                peer.start(2, 2.0)
            outcomes = [peer.outcome(60) for peer in left]
            assert {kind for kind, _ in outcomes} == {"WeightSyncError"}
            name = "trainer-1" if victim == "trainer" else "engine-1"
            assert any("deadline passed while waiting for" in text and name in text for _, text in outcomes)
        finally:
            for peer in everybody:
                peer.stop()
