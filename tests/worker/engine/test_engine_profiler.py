"""Profiles of generation: one file a worker, and generation goes on whatever becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljob_worker.devices.profiling import ProfileOrder, ProfileResult
from rljob_worker.engine.profiler import EngineProfiler

ORDER = ProfileOrder("/run/profiles/step-2/engine-3.json.gz", 1000, stacks=False)
BEGIN, END = "rljob_begin_profile", "rljob_end_profile"


class Workers:
    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[str, Sequence[object]]] = []
        self._fails = fails

    def __call__(self, method: str, arguments: Sequence[object]) -> Sequence[Any]:
        self.calls.append((method, arguments))
        if method == self._fails:
            raise RuntimeError("a worker does not answer")
        # As they come over the wire.
        return [] if method == BEGIN else [[("a.json.gz", 10, "")], [("b.json.gz", 0, "full")]]


def test_each_worker_of_an_engine_gets_a_file_of_its_own_once() -> None:
    workers = Workers()
    profiler = EngineProfiler(workers, 2)
    profiler.ask(ORDER)
    for _ in range(2):
        with profiler.work():
            pass
    files = [f"/run/profiles/step-2/engine-3-worker-{rank}.json.gz" for rank in range(2)]
    assert workers.calls == [(BEGIN, (files, 1000, False)), (END, ())]
    assert profiler.results() == [ProfileResult("a.json.gz", 10), ProfileResult("b.json.gz", problem="full")]
    assert profiler.results() == []


def test_a_single_worker_has_the_engines_file_and_an_order_can_be_taken_back() -> None:
    workers = Workers()
    profiler = EngineProfiler(workers, 1)
    profiler.ask(ORDER)
    profiler.ask(None)
    with profiler.work():
        pass
    assert workers.calls == []
    profiler.ask(ORDER)
    with profiler.work():
        pass
    assert workers.calls[0] == (BEGIN, ([ORDER.file], 1000, False))


def test_workers_that_fail_cost_the_profile_alone() -> None:
    for method, calls in ((BEGIN, 1), (END, 2)):
        workers, done = Workers(fails=method), []
        profiler = EngineProfiler(workers, 1)
        profiler.ask(ORDER)
        with profiler.work():
            done.append(True)
        assert done
        assert len(workers.calls) == calls
        assert profiler.results() == [ProfileResult(ORDER.file, problem="a worker does not answer")]
