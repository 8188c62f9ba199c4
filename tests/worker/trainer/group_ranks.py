"""Ranks that give up and rebuild their process groups; `test_process_groups.py` starts them.

Called as `python group_ranks.py FOLDER CASE:WORLD_SIZE:PORT...`. For each case it forks that many ranks, which saves
their imports, and writes `CASE.json`: for each rank its exit code and what it saw. Groups without Megatron meet at the
port.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import torch
import torch.distributed as dist
from cases import SAMPLING, make_batch, same, state, step

from rljob_worker.trainer.megatron.parallel_state import GROUP_HOLDERS
from rljob_worker.trainer.process_groups import ProcessGroups

CYCLES = 20
SETTLED = 5
"""Cycles after which nothing may grow any more."""
DEADLINE = 6.0


def resources() -> dict[str, int]:
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}


class Process(cases.Process):
    """One rank of a case, the first of which listens at the port."""

    def __init__(self, rank: int, world_size: int, folder: Path, name: str, port: int) -> None:
        super().__init__(rank, world_size, folder, name)
        self.port = port


def cycles(process: Process, count: int = CYCLES, **training: Any) -> dict[str, Any]:
    """Steps and sleeps that give up the groups, against the same steps without."""
    steps = {0, 1, SETTLED, count - 1}
    kept = process.trainer(**training)
    for seed in sorted(steps):
        expected = step(kept, seed).metrics
    states = state(kept)
    kept.close()
    trainer = process.trainer(memorySaver={"releaseProcessGroups": True}, **training)
    seen, seconds = [], []
    for seed in range(count):
        if seed in steps:
            metrics = step(trainer, seed).metrics
        asleep = trainer.sleep()
        again = trainer.sleep().transition
        assert again is not None
        assert not again.changed
        assert dist.get_backend() == "gloo"
        dist.all_reduce(torch.ones(1))
        seen.append(resources())
        seconds.append(trainer.wake_up().group_seconds)
    threads = [thread.name for thread in threading.enumerate()]
    result = {
        "equal": same(states, state(trainer)) and metrics == expected,
        "changed": asleep.transition is not None and asleep.transition.changed,
        "settled": seen[min(SETTLED, count - 1)],
        "after": seen[-1],
        "seconds": max(seconds),
        "python_threads": threads,
    }
    trainer.train(make_batch(0), SAMPLING, 1)
    trainer.close()
    return result


def refused(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def bare(process: Process, timeout_seconds: float = DEADLINE, *, known: bool = True) -> tuple[ProcessGroups, Any]:
    """Groups without Megatron: pairs of neighbours, made on all ranks; of three, the last is in none."""
    groups = ProcessGroups(
        f"tcp://127.0.0.1:{process.port}",
        rank=process.rank,
        world_size=process.world_size,
        backend="gloo",
        timeout_seconds=timeout_seconds,
        holders=(*GROUP_HOLDERS, __name__) if known else GROUP_HOLDERS,
    )
    holder = type("Holder", (), {})()
    with groups.recording():
        for first in range(0, process.world_size - 1, 2):
            group = dist.new_group([first, first + 1])
            if process.rank in (first, first + 1):
                holder.group = group
            del group
    return groups, holder


def fault(process: Process, where: str, victim: int) -> dict[str, Any]:
    """The victim dies at a point; the others must end with an error in time."""
    groups, _holder = bare(process)
    joined = [process.folder / f"joined-{where.replace(' ', '-')}-{victim}-{r}" for r in range(process.world_size)]
    joined[process.rank].touch()
    if process.rank == victim:
        # A rank that is still joining when it goes fails before the case begins.
        deadline = time.monotonic() + DEADLINE
        while not all(mark.exists() for mark in joined) and time.monotonic() < deadline:
            time.sleep(0.01)
        end = lambda *_, **__: os._exit(9)  # noqa: E731
        if where == "before release":
            end()
        groups.release()
        if where == "while released":
            end()
        dist.new_group = end if where == "while rebuilding" else dist.new_group
        groups.rebuild()
        raise AssertionError("the victim lives")
    started = time.monotonic()
    message = refused(groups.release) or refused(groups.rebuild)
    seconds = time.monotonic() - started
    again = refused(groups.release) or refused(groups.rebuild)
    return {"message": message, "seconds": seconds, "state": groups.state, "again": again}


def states(process: Process) -> dict[str, Any]:
    """Calls that do nothing, calls that are refused, and a group that was not recorded."""
    groups, holder = bare(process, 60.0)
    holder.twice = [holder.group, {"deep": holder.group}]
    died = weakref.ref(holder.group)
    live = groups.state
    idle = groups.rebuild()
    took = groups.release()
    released, idle_again = groups.state, groups.release()
    asleep = refused(lambda: dist.all_reduce(torch.ones(1), group=holder.group))
    gone = died() is None
    groups.rebuild()
    replaced = holder.twice[0] is holder.group and holder.twice[1]["deep"] is holder.group
    value = torch.full((1,), float(process.rank))
    dist.all_reduce(value, group=holder.group)
    late = dist.new_group(list(range(process.world_size)), group_desc="late")
    unknown = refused(groups.release)
    dist.barrier(group=late)
    return {
        "states": [live, released],
        "idle": [idle, idle_again],
        "took": took,
        "asleep": asleep,
        "gone": gone,
        "replaced": replaced,
        "value": value.item(),
        "unknown": unknown,
    }


def stuck(process: Process) -> dict[str, Any]:
    """A group in a place that cannot be changed is found, not forgotten."""
    groups, holder = bare(process, 60.0)
    holder.tuple = (holder.group,)
    message = refused(groups.release)
    return {"message": message, "state": groups.state}


def foreign(process: Process) -> dict[str, Any]:
    """A group that an object of an unknown package keeps is found, named and left as it is."""
    groups, holder = bare(process, 60.0, known=False)
    group = weakref.ref(holder.group)
    message = refused(groups.release)
    return {"message": message, "state": groups.state, "kept": holder.group is group()}


CASES: dict[str, Callable[[Process], dict[str, Any]]] = {
    "tp2": lambda p: cycles(p, tensorParallel=2),
    "pp2": lambda p: cycles(p, pipelineParallel=2),
    "dp2": cycles,
    "tp2_pp2": lambda p: cycles(p, 6, tensorParallel=2, pipelineParallel=2),
    "states": states,
    "stuck": stuck,
    "foreign": foreign,
    **{
        f"{where}/{victim}": lambda p, where=where, victim=victim: fault(p, where, victim)
        for where in ("before release", "while released", "while rebuilding")
        for victim in (0, 1)
    },
}


def main(folder: Path, given: list[str]) -> None:
    warnings.simplefilter("ignore")
    for case, size, port in (case.split(":") for case in given):
        name = case.replace("/", "-")
        pids = [fork(case, Process(rank, int(size), folder, name, int(port))) for rank in range(int(size))]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        seen = [json.loads(file.read_text()) if file.exists() else None for file in map(report_of(folder), pids)]
        (folder / f"{name}.json").write_text(json.dumps({"codes": codes, "ranks": seen}))


def report_of(folder: Path) -> Callable[[int], Path]:
    return lambda pid: folder / f"report-{pid}.json"


def fork(case: str, process: Process) -> int:
    pid = os.fork()
    if pid:
        return pid
    faulthandler.dump_traceback_later(240, exit=True)
    code = 1
    try:
        result = CASES[case](process)
        report_of(process.folder)(os.getpid()).write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Peers may be gone: leaving in order is not what is tested.
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
