"""Groups that share a loop."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from rljob_worker.upstream.torch_gloo import PATCHES

GROUPS = 6


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _rank(rank: int, path: str, shared: bool, answers: Connection) -> None:
    if shared:
        PATCHES[0].apply()
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    before = _threads()
    groups = [dist.new_group([0, 1]) for _ in range(GROUPS)]
    threads = _threads() - before
    sums = []
    for group in groups:
        values = torch.full((3,), float(rank + 1))
        dist.all_reduce(values, group=group)
        sums.append(values.tolist())
    if rank == 1:
        os._exit(0)
    try:
        dist.all_reduce(torch.ones(1), group=groups[0])
        lost = ""
    except RuntimeError as error:
        lost = str(error)
    answers.send((threads, sums, lost))


def _run(path: str, shared: bool) -> tuple[int, list[list[float]], str]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    ranks = [context.Process(target=_rank, args=(rank, path, shared, theirs)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        assert mine.poll(120), "rank 0 gave no answer"
        answer: tuple[int, list[list[float]], str] = mine.recv()
    finally:
        for process in ranks:
            process.kill()
            process.join(30)
    return answer


def test_groups_on_a_shared_loop_work_fail_and_take_a_thread_less_each(tmp_path: Path) -> None:
    """They reduce like any others, and a peer that is gone is an error at once."""
    threads, sums, lost = _run(str(tmp_path / "shared"), True)
    assert sums == [[3.0] * 3] * GROUPS
    assert "127.0.0.1" in lost or "Connection" in lost, lost
    assert threads == _run(str(tmp_path / "own"), False)[0] - GROUPS
