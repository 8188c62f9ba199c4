"""Requests of other threads to a generation, with a loop of a few lines in the engine's place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from rljob_worker.engine.service import RequestService
from rljob_worker.errors import StopRequested
from rljob_worker.types import Cut, Generation, GenerationRequest, Quota

PARAMS: Any = None


def request(length: int, group: int = 0, key: int | None = None) -> GenerationRequest:
    return GenerationRequest((1,), length, group=group, key=key)


class Loop:
    """Grows each request by one token a step, to as many as its seed says; a step waits for the gate."""

    def __init__(self) -> None:
        self.growing: dict[int, list[int]] = {}
        self.steps = self.interrupted = self.given_up = 0
        self.gate = threading.Semaphore(1_000_000)

    def __len__(self) -> int:
        return len(self.growing)

    def add(self, first: int, requests: Sequence[GenerationRequest], _params: Any) -> None:
        for index, one in enumerate(requests, first):
            self.growing[index] = [0, one.seed]

    def step(self) -> list[tuple[int, Generation]]:
        assert self.gate.acquire(timeout=60)
        self.steps += 1
        for state in self.growing.values():
            state[0] += 1
        ended = [index for index, (length, wanted) in self.growing.items() if length == wanted]
        return [(index, self._generation(index, "length")) for index in ended if self.growing.pop(index, None) or True]

    def interrupt(self) -> None:
        self.interrupted += 1

    def take_back(self) -> list[tuple[int, Generation]]:
        taken = [(index, self._generation(index, "", state[0])) for index, state in sorted(self.growing.items())]
        self.growing.clear()
        return taken

    def give_up(self) -> None:
        self.given_up += 1
        self.growing.clear()

    def _generation(self, index: int, reason: str, length: int | None = None) -> Generation:
        count = self.steps if length is None else length
        return Generation(np.full(count, index), np.zeros(count, np.float32), reason)


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def service(loop: Loop) -> RequestService:
    return RequestService(loop)  # type: ignore[arg-type]


def beside(action: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run it in a thread; what it returned or raised."""
    result: list[Any] = []

    def work() -> None:
        try:
            result.append(action())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, result


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def reasons(generations: list[Generation]) -> list[str]:
    return [generation.finish_reason for generation in generations]


def test_a_generation_ends_with_its_last_response(service: RequestService, loop: Loop) -> None:
    seen: list[int] = []
    done = service.run([request(3), request(1), request(2)], PARAMS, lambda index, _: seen.append(index))
    assert reasons(done) == ["length"] * 3
    assert seen == [1, 2, 0]
    assert loop.steps == 3
    assert service.run([], PARAMS) == []


@pytest.mark.parametrize(
    ("quotas", "steps"),
    [
        ([(1, {5, 6, 7})], 2),
        ([(2, {5, 6, 7})], 4),
        ([(1, {5, 6, 7}), (1, {7})], 6),
        ([(1, {6, 7})], 4),
        ([(3, {5, 6, 7})], 6),
        ([(9, {5, 6, 7})], 6),
    ],
)
def test_a_cut_ends_it_in_the_step_that_completes_enough_groups(
    service: RequestService, loop: Loop, quotas: list[tuple[int, set[int]]], steps: int
) -> None:
    cut = Cut(tuple(Quota(least, frozenset(among)) for least, among in quotas))
    requests = [request(1, 5), request(2, 5), request(4, 6), request(3, 6), request(6, 7), request(1, 7)]
    given: list[int] = []
    done = service.run(requests, PARAMS, lambda index, _: given.append(index), cut=cut)
    assert loop.steps == steps
    assert reasons(done) == ["length" if one.seed <= steps else "" for one in requests]
    assert sorted(given) == list(range(6))
    assert not loop.growing


def test_a_generation_that_takes_more_requests_is_not_cut(service: RequestService, loop: Loop) -> None:
    """After the first turn of its episodes a group would be complete."""
    cut = Cut((Quota(1, frozenset({5})),))
    with pytest.raises(ValueError, match="takes more requests cannot be cut"):
        service.run([request(1, 5)], PARAMS, cut=cut, more=lambda _: None)
    assert loop.steps == 0


def test_responses_have_the_keys_of_their_requests_in_whatever_order_those_arrive(
    service: RequestService, loop: Loop
) -> None:
    given: list[int] = []
    run = partial(service.run, [request(1, key=70)], PARAMS, lambda key, _: given.append(key), more=lambda _: None)
    thread, result = beside(run)
    until(lambda: given == [70])
    # Asked for in the order 71, 72: each call came in a thread of its own.
    service.submit([request(2, key=72)])
    service.submit([request(3, key=71)])
    with pytest.raises(ValueError, match="two requests have the key 72"):
        service.submit([request(2, key=72)])
    until(lambda: len(given) == 3)
    service.close()
    thread.join(60)
    assert set(given) == {70, 71, 72}
    assert reasons(result[0]) == ["length"] * 3
    with pytest.raises(ValueError, match="two requests have the key 1"):
        service.run([request(1, key=1), request(1)], PARAMS)
    assert loop.steps > 0


def test_it_says_that_nothing_is_left_to_generate(service: RequestService, loop: Loop) -> None:
    idle: list[int] = []
    run = partial(service.run, [request(2)], PARAMS, more=lambda _: None, on_idle=lambda: idle.append(loop.steps))
    thread, _ = beside(run)
    until(lambda: len(idle) > 1)
    service.submit([request(5)])
    until(lambda: len(idle) > 2)
    service.close()
    thread.join(60)
    assert idle == [0, 2, 7], "at first that requests may come"
    assert service.idle_seconds > 0


def test_requests_come_until_it_is_closed(service: RequestService, loop: Loop) -> None:
    checked: list[int] = []

    def check(requests: Sequence[GenerationRequest]) -> None:
        checked.extend(one.seed for one in requests)
        if any(one.seed == 9 for one in requests):
            raise ValueError("nine")

    thread, result = beside(lambda: service.run([request(1)], PARAMS, more=check))
    until(lambda: loop.steps == 1)
    with pytest.raises(ValueError, match="nine"):
        service.submit([request(2), request(9)])
    service.submit([request(5)])
    until(lambda: loop.steps == 6)
    assert thread.is_alive(), "it ended before it was closed"
    service.close()
    thread.join(60)
    assert reasons(result[0]) == ["length", "length"]
    assert checked == [2, 9, 5]
    with pytest.raises(RuntimeError, match="no generation runs that takes more requests"):
        service.submit([request(1)])


@pytest.mark.parametrize("by_version", [False, True])
def test_one_that_was_harvested_or_failed_takes_no_more(service: RequestService, loop: Loop, by_version: bool) -> None:
    run = partial(service.run, [request(2_000_000)], PARAMS, more=lambda _: None, version=4)
    thread, result = beside(run)
    until(lambda: loop.steps > 0)
    assert service.submit([request(3_000_000)])
    if by_version:
        service.harvest_version(4)
    else:
        service.harvest()
    thread.join(60)
    assert not service.submit([request(1)])
    assert reasons(result[0]) == ["", ""], "each that was taken is given back"
    thread, result = beside(partial(run, version=5))
    until(lambda: service.submit([]))
    service.abort()
    thread.join(60)
    assert isinstance(result[0], StopRequested)
    assert not service.submit([request(1)]), "who waits for it is told why"


def test_it_is_held_between_two_steps_and_goes_on(service: RequestService, loop: Loop) -> None:
    thread, result = beside(lambda: service.run([request(2_000_000)], PARAMS))
    until(lambda: loop.steps > 0)
    service.pause(10)
    held = loop.steps
    time.sleep(0.05)
    assert (loop.steps, loop.interrupted) == (held, 1)
    service.resume()
    until(lambda: loop.steps > held)
    service.pause(10)
    service.harvest()
    thread.join(60)
    (taken,) = result[0]
    assert (taken.finish_reason, len(taken.token_ids)) == ("", loop.steps)
    for ask in (lambda: service.pause(1), service.harvest):
        with pytest.raises(RuntimeError, match="no generation runs"):
            ask()


def test_a_step_that_does_not_end_is_no_pause(service: RequestService, loop: Loop) -> None:
    loop.gate = threading.Semaphore(1)
    thread, result = beside(lambda: service.run([request(3)], PARAMS))
    until(lambda: loop.steps == 1)
    with pytest.raises(TimeoutError, match=r"its step did not end within 0\.05 s"):
        service.pause(0.05)
    loop.gate.release(2)
    thread.join(60)
    assert reasons(result[0]) == ["length"]
    assert loop.interrupted == 0


def test_weights_that_are_to_be_replaced_end_their_generation_and_those_that_begin_yet(
    service: RequestService, loop: Loop
) -> None:
    """The word may come before the generation it means: then that one samples nothing and loses nothing."""
    loop.gate = threading.Semaphore(0)
    thread, result = beside(lambda: service.run([request(1), request(1000)], PARAMS, more=lambda _: None, version=3))
    loop.gate.release()
    until(lambda: loop.steps == 1)
    service.harvest_version(2)
    loop.gate.release(2)
    until(lambda: loop.steps == 3)
    assert thread.is_alive(), "weights 3 are newer than those"
    service.harvest_version(3)
    loop.gate.release(1_000_000)
    thread.join(60)
    assert reasons(result[0]) == ["length", ""]
    assert loop.steps <= 5
    assert reasons(service.run([request(5)], PARAMS, version=3)) == [""]
    assert reasons(service.run([request(5)], PARAMS, version=4)) == ["length"]


def test_an_abort_ends_it_wherever_it_is(service: RequestService, loop: Loop) -> None:
    def refuse(_requests: Sequence[GenerationRequest]) -> None: ...

    def abort_in_a_pause() -> None:
        service.pause(10)
        service.abort()

    for more, abort in ((None, service.abort), (None, abort_in_a_pause), (refuse, service.abort)):
        before, steps = loop.given_up, loop.steps
        requests = [request(1 if more else 9**9)]
        thread, result = beside(partial(service.run, requests, PARAMS, more=more))
        while loop.steps == steps:
            time.sleep(0.002)
        abort()
        thread.join(60)
        assert isinstance(result[0], StopRequested)
        assert loop.given_up == before + 1
    service.abort()
    with pytest.raises(StopRequested):
        service.run([request(1)], PARAMS)
    assert len(service.run([request(loop.steps + 1)], PARAMS)) == 1
