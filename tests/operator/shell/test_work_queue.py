"""The queue: each key once at a time, back-off per key, one timer per key."""

from __future__ import annotations

import asyncio

import pytest

from rljob_operator.shell.api.resources import JobKey
from rljob_operator.shell.jobs.queue import Stopped, WorkQueue

A, B = JobKey("n", "a"), JobKey("n", "b")


async def taken(queue: WorkQueue) -> list[JobKey]:
    return [await queue.get() for _ in range(len(queue))]


def test_a_key_is_given_out_once_however_often_it_is_added() -> None:
    async def run() -> None:
        queue = WorkQueue()
        for key in (A, B, A, A):
            queue.add(key)
        assert await taken(queue) == [A, B]

    asyncio.run(run())


def test_a_key_that_is_worked_on_is_given_out_again_only_after_that() -> None:
    async def run() -> None:
        queue = WorkQueue()
        queue.add(A)
        assert await queue.get() == A
        queue.add(A)
        queue.add(A)
        assert len(queue) == 0
        queue.done(A)
        assert await taken(queue) == [A]
        queue.done(A)
        assert len(queue) == 0

    asyncio.run(run())


def test_backoff_grows_per_key_and_ends_with_success() -> None:
    async def run() -> None:
        queue = WorkQueue(first_backoff=1.0, longest_backoff=5.0)
        seconds = [queue.failed(A) for _ in range(5)]
        for found, wanted in zip(seconds, (1, 2, 4, 5, 5)):
            assert 0.8 * wanted <= found <= 1.2 * wanted
        assert queue.failed(B) <= 1.2
        assert queue.failed(A, at_least=30) == 30
        assert queue.failed(A, at_most=2) == 2
        queue.succeeded(A)
        assert queue.failed(A) <= 1.2
        queue.stop()

    asyncio.run(run())


def test_a_later_wish_replaces_the_earlier_one() -> None:
    async def run() -> None:
        queue = WorkQueue()
        queue.add_after(A, 0.01)
        queue.add_after(A, 10)
        queue.add_after(B, 0.01)
        queue.add_after(B, None)
        await asyncio.sleep(0.05)
        assert len(queue) == 0
        queue.add_after(A, 0.01)
        assert await asyncio.wait_for(queue.get(), 1) == A
        queue.stop()

    asyncio.run(run())


def test_stop_wakes_all_who_wait_and_gives_out_nothing_more() -> None:
    async def run() -> None:
        queue = WorkQueue()
        waiting = [asyncio.create_task(queue.get()) for _ in range(3)]
        await asyncio.sleep(0.01)
        queue.stop()
        queue.add(A)
        for task in waiting:
            with pytest.raises(Stopped):
                await asyncio.wait_for(task, 1)
        with pytest.raises(Stopped):
            await queue.get()

    asyncio.run(run())


def test_a_cancelled_waiter_loses_no_key() -> None:
    async def run() -> None:
        queue = WorkQueue()
        first, second = asyncio.create_task(queue.get()), asyncio.create_task(queue.get())
        await asyncio.sleep(0.01)
        queue.add(A)
        first.cancel()
        assert await asyncio.wait_for(second, 1) == A

    asyncio.run(run())


def test_each_line_comes_before_the_next_and_starves_none() -> None:
    async def run() -> None:
        queue = WorkQueue(first=lambda key: key.name.startswith("new"))
        for number in range(20):
            queue.add_after(JobKey("n", f"routine{number}"), 0.0)
        await asyncio.sleep(0.02)
        for number in range(20):
            queue.add(JobKey("n", f"changed{number}"))
            queue.add(JobKey("n", f"new{number}"))
        kinds = [key.name.rstrip("0123456789") for key in await taken(queue)]
        assert len(kinds) == 60
        for turn in range(0, 24, 8):
            assert sorted(kinds[turn : turn + 8]) == ["changed", *["new"] * 5, "routine", "routine"]

    asyncio.run(run())


def test_a_key_that_no_longer_comes_first_goes_to_the_end_of_the_second_line() -> None:
    async def run() -> None:
        first = {A, B}
        queue = WorkQueue(first=first.__contains__)
        queue.add(A)
        queue.add(JobKey("n", "changed"))
        queue.add(B)
        first.discard(A)
        assert await taken(queue) == [B, JobKey("n", "changed"), A]

    asyncio.run(run())


def test_news_about_a_routine_key_move_it_up_and_it_stays_once() -> None:
    async def run() -> None:
        queue = WorkQueue()
        for key in (B, A):
            queue.add_after(key, 0.0)
            await asyncio.sleep(0.01)
        queue.add(A)
        queue.add(A)
        assert len(queue) == 2
        assert await taken(queue) == [A, B]

    asyncio.run(run())
