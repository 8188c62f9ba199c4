"""The state machines alone: any legal interleaving completes, any other message is refused."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_cases import model_weights, plan_for

from rljob_worker.errors import WeightSyncError
from rljob_worker.weightsync.mailbox import Message, engine_name, trainer_name
from rljob_worker.weightsync.plan import SyncPlan
from rljob_worker.weightsync.protocol import (
    ACKNOWLEDGED,
    COMMIT,
    DONE,
    DOUBTED,
    FILLED,
    READY,
    SUMS,
    EngineState,
    TrainerState,
)
from rljob_worker.weightsync.slots import SLOT_COUNT

VERSION = 7
WEIGHTS = model_weights(0)


def filled(plan: SyncPlan, trainer: int, bucket: int, change: dict[str, Any] | None = None) -> Message:
    digests = [1000 * bucket + n for n, group in enumerate(plan.groups[bucket]) if group.trainer == trainer]
    body = {"version": VERSION, "plan": plan.fingerprint, "bucket": bucket, "digests": digests}
    return Message(FILLED, trainer_name(trainer), 1, body | (change or {}))


class Simulation:
    """All peers of one sync; `step(choice)` lets one of those that can act do so."""

    def __init__(self, trainers: int, engines: int) -> None:
        self.plan = plan_for(WEIGHTS, trainers=trainers, engines=engines, bucket_bytes=6000)
        self.trainers = {p: TrainerState(self.plan, VERSION) for p in self.plan.trainers}
        self.engines = {c: EngineState(self.plan, VERSION) for c in range(engines)}
        self.next_fill = dict.fromkeys(self.trainers, 0)
        self.committed: set[int] = set()
        self.inbox: dict[str, deque[Message]] = {
            name: deque() for name in [*map(trainer_name, self.trainers), *map(engine_name, self.engines)]
        }
        self.said_done: set[int] = set()
        self.slots: list[int | None] = [None] * SLOT_COUNT
        self.landing: dict[int, int] = {}
        for engine in self.engines:
            self.from_engine(engine, READY, version=VERSION, plan=self.plan.fingerprint)

    def from_engine(self, engine: int, kind: str, **body: Any) -> None:
        for trainer in self.trainers:
            self.inbox[trainer_name(trainer)].append(Message(kind, engine_name(engine), 1, body))

    def from_trainer(self, message: Message) -> None:
        for engine in self.engines:
            self.inbox[engine_name(engine)].append(message)

    def actions(self) -> list[Any]:
        possible: list[Any] = [("read", name) for name, messages in self.inbox.items() if messages]
        for trainer, state in self.trainers.items():
            bucket = self.next_fill[trainer]
            if bucket < len(self.plan.buckets):
                if not state.blocking(bucket):
                    possible.append(("fill", trainer))
            elif not state.not_done() and trainer not in self.committed:
                possible.append(("commit", trainer))
        for engine, state in self.engines.items():
            if state.bucket() is not None and not state.missing():
                possible.append(("land", engine))
            elif state.bucket() is None and engine not in self.said_done:
                possible.append(("done", engine))
        return possible

    def act(self, action: str, who: Any) -> None:
        if action == "read":
            kind, number = who.split("-")
            states: dict[int, Any] = self.trainers if kind == "trainer" else self.engines
            states[int(number)].take(self.inbox[who].popleft())
        elif action == "fill":
            bucket = self.next_fill[who]
            # Nobody may still need what the slot held before.
            assert all(
                state.bucket() is None or state.bucket().index > bucket - SLOT_COUNT for state in self.engines.values()
            )
            self.next_fill[who] += 1
            if who in self.plan.writers[bucket]:
                self.from_trainer(filled(self.plan, who, bucket))
        elif action == "land":
            state = self.engines[who]
            bucket = state.bucket()
            assert bucket is not None
            assert all(self.next_fill[p] > bucket.index for p in self.plan.writers[bucket.index])
            expected = [1000 * bucket.index + number for number in range(len(self.plan.groups[bucket.index]))]
            assert state.digests() == expected
            state.landed()
            self.from_engine(who, ACKNOWLEDGED, bucket=bucket.index)
        elif action == "done":
            self.said_done.add(who)
            self.from_engine(who, DONE, version=VERSION)
        else:
            self.committed.add(who)
            self.from_trainer(Message(COMMIT, trainer_name(who), 1, {"version": VERSION}))


@given(trainers=st.integers(1, 3), engines=st.integers(1, 3), data=st.data())
@settings(max_examples=25)
def test_every_interleaving_completes(trainers: int, engines: int, data: st.DataObject) -> None:
    simulation = Simulation(trainers, engines)
    random = data.draw(st.randoms(use_true_random=False))
    while actions := simulation.actions():
        simulation.act(*random.choice(actions))
    assert simulation.committed == set(simulation.trainers)
    assert all(not state.not_committed() for state in simulation.engines.values())


@given(data=st.data(), fault=st.sampled_from(["drop", "duplicate", "swap"]))
@settings(max_examples=60)
def test_a_lost_repeated_or_reordered_message_never_completes(data: st.DataObject, fault: str) -> None:
    simulation = Simulation(2, 2)
    random = data.draw(st.randoms(use_true_random=False))
    when = data.draw(st.integers(0, 60))
    done = False
    with_error = False
    for step in itertools.count():
        waiting = [name for name, messages in simulation.inbox.items() if messages]
        if not done and step >= when and waiting:
            done = damage(simulation.inbox[random.choice(waiting)], fault)
        actions = simulation.actions()
        if not actions:
            break
        try:
            simulation.act(*random.choice(actions))
        except WeightSyncError:
            with_error = True
            break
    if done:
        complete = all(not state.not_committed() for state in simulation.engines.values())
        assert with_error or not complete


def damage(messages: deque[Message], fault: str) -> bool:
    if fault == "drop":
        messages.popleft()
    elif fault == "duplicate":
        messages.append(messages[0])
    else:
        same_sender = [i for i, message in enumerate(messages) if message.sender == messages[0].sender]
        if len(same_sender) < 2:
            return False
        first, second = same_sender[:2]
        messages[first], messages[second] = messages[second], messages[first]
    return True


def test_each_group_of_pieces_has_a_digest() -> None:
    plan = plan_for(WEIGHTS, trainers=2, bucket_bytes=20_000)
    digests = filled(plan, 0, 0).body["digests"]
    assert isinstance(digests, list)
    assert len(digests) == 2, "whole tensors, and parts of others"
    cases: list[tuple[object, str]] = [
        (digests[:-1], "has 1 digests, expected 2"),
        ([*digests, 5], "has 3 digests, expected 2"),
        (None, "has no digests"),
        ([digests[0], "5"], f"'5' is no checksum; of .*{plan.groups[0][1].pieces[0][0].name}"),
        ([True, digests[1]], "True is no checksum"),
    ]
    for reported, message in cases:
        with pytest.raises(WeightSyncError, match=f"bucket 0 from trainer-0.*{message}"):
            EngineState(plan, VERSION).take(filled(plan, 0, 0, {"digests": reported}))
    EngineState(plan, VERSION).take(filled(plan, 0, 0))


def test_sums_are_taken_from_those_who_were_asked_once_and_of_the_bucket_that_lands() -> None:
    plan = plan_for(WEIGHTS, trainers=2, bucket_bytes=20_000)
    state = EngineState(plan, VERSION)
    for trainer in plan.trainers:
        state.take(filled(plan, trainer, 0))
    count = len(list(plan.buckets[0].pieces_of(1)))

    def sums(trainer: int, bucket: int, numbers: list[int]) -> Message:
        return Message(SUMS, trainer_name(trainer), VERSION, {"bucket": bucket, "sums": numbers})

    with pytest.raises(WeightSyncError, match="trainer-1 sent sums, for which nobody asked"):
        state.take(sums(1, 0, [1] * count))
    state.doubt([1])
    assert state.silent() == ["trainer-1"]
    for trainer, bucket in ((0, 0), (1, 1)):
        with pytest.raises(WeightSyncError, match="for which nobody asked"):
            state.take(sums(trainer, bucket, [1] * count))
    with pytest.raises(WeightSyncError, match=f"has 1 sums, expected {count}"):
        state.take(sums(1, 0, [1]))
    state.take(sums(1, 0, list(range(count))))
    assert not state.silent()
    assert state.sums(1) == list(range(count))
    with pytest.raises(WeightSyncError, match="for which nobody asked"):
        state.take(sums(1, 0, [1] * count))


def test_a_trainer_is_asked_only_about_the_bucket_that_the_engine_lands() -> None:
    plan = plan_for(WEIGHTS)
    state = TrainerState(plan, VERSION)
    state.take(Message(READY, "engine-0", VERSION, {"version": VERSION, "plan": plan.fingerprint}))
    assert state.take(Message(DOUBTED, "engine-0", VERSION, {"bucket": 0})) == 0
    state.take(Message(ACKNOWLEDGED, "engine-0", VERSION, {"bucket": 0}))
    with pytest.raises(WeightSyncError, match="engine-0 doubts bucket 0, expected 1"):
        state.take(Message(DOUBTED, "engine-0", VERSION, {"bucket": 0}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": VERSION - 1}, "at version 6, expected 7"),
        ({"plan": "0"}, "another plan"),
        ({"bucket": 1}, "filled bucket 1, expected bucket 0"),
    ],
)
def test_a_filled_bucket_of_another_sync_is_refused(change: dict[str, Any], message: str) -> None:
    plan = plan_for(WEIGHTS)
    with pytest.raises(WeightSyncError, match=message):
        EngineState(plan, VERSION).take(filled(plan, 0, 0, change))


def test_a_slot_refilled_before_it_was_landed_is_refused() -> None:
    plan = plan_for(WEIGHTS)
    state = EngineState(plan, VERSION)
    for bucket in range(SLOT_COUNT):
        state.take(filled(plan, 0, bucket))
    with pytest.raises(WeightSyncError, match="while its slot was in use"):
        state.take(filled(plan, 0, SLOT_COUNT))


def test_strangers_are_refused() -> None:
    plan = plan_for(WEIGHTS)
    with pytest.raises(WeightSyncError, match="trainer-4 sent filled, but takes no part"):
        EngineState(plan, VERSION).take(Message(FILLED, "trainer-4", 1))
    with pytest.raises(WeightSyncError, match="engine-1 sent ready, but takes no part"):
        TrainerState(plan, VERSION).take(Message(READY, "engine-1", 1))
