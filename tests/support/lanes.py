"""`make test` runs three pytest processes side by side: their files, and where the time went.

A file of tests is run by one process from its first test to its last, so that what its tests share is made once. The
last process alone takes `tests/cluster` (network namespaces, control groups, containerd's socket and the node are
there once on a machine), and takes it first: it is the longest chain of tests that cannot be divided. It waits more
than it computes, for intervals of Kubernetes. The first process begins with the fast files, the others with the
longest. A process that is done goes on with what is left of the rest. How many large files run at once: `places`.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

CLUSTER = "tests/cluster/"
LONGEST = tuple(
    f"tests/{file}.py"
    for file in (
        "worker/driver/test_job", "worker/driver/test_nodes_apart", "worker/driver/test_fault_matrix",
        "contract/test_npu_job", "worker/driver/test_existing_ray", "worker/driver/test_closed_ports",
        "worker/doctor/test_deep_and_ray",
        "contract/test_npu", "contract/test_npu_doctor", "api/test_added_files", "worker/weightsync/test_vllm_sync",
        "worker/engine/test_rollout_engine",
        "worker/driver/test_async", "worker/driver/test_on_limit", "worker/trainer/test_trainer",
        "worker/trainer/test_process_groups", "worker/upstream/test_patches",
        "worker/driver/test_lockstep", "worker/planning/test_runs", "worker/checkpoints/test_damaged_checkpoint",
        "worker/models/test_model_conversion",
    )
)  # fmt: skip
"""Files that take a minute or more, the longest first: the last to begin should be short."""
NICE = 3
FILES_SHOWN = 25


class Lanes(LoadScopeScheduling):
    """Files in the order of collection, those of CLUSTER for the last process only."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if (file := self._next_file(node)) is not None:
            self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if self._next_file(node) is None and not node.shutting_down:
            # A process runs its last test only when it knows that it is the last.
            node.shutdown()
        else:
            super()._reschedule(node)

    def _next_file(self, node: WorkerController) -> str | None:
        number, count = int(node.workerinput["workerid"].removeprefix("gw")), node.workerinput["workercount"]
        return next_file(list(self.workqueue), number, count)


def next_file(left: Sequence[str], process: int, processes: int) -> str | None:
    """The file that a process takes next.

    Args:
        left: files that nobody took, in the order of collection.
        process: its number, from 0.
        processes: how many there are.
    """
    of_cluster = [file for file in left if file.startswith(CLUSTER)]
    longest = [file for file in LONGEST if file in left]
    others = [file for file in left if not file.startswith(CLUSTER) and file not in LONGEST]
    if process == processes - 1:
        order = [*of_cluster, *longest, *others]
    elif process == 0:
        order = [*others, *longest]
    else:
        order = [*longest, *others]
    return next(iter(order), None)


def give_way(workerinput: Mapping[str, Any] | None) -> None:
    """All processes but the last leave it the processor when it needs it: its chain of tests decides when all are done.

    Args:
        workerinput: pytest-xdist's data for this process; None where it is not one of several.
    """
    if workerinput is not None and workerinput["workerid"] != f"gw{workerinput['workercount'] - 1}":
        os.nice(NICE)


class Seconds:
    """Seconds of each file, each folder and each process, and the share of the processors that were busy meanwhile."""

    def __init__(self) -> None:
        self._files: defaultdict[str, float] = defaultdict(float)
        self._lanes: defaultdict[str, float] = defaultdict(float)
        self._began = time.monotonic(), cpu_times()
        self._ended: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._files[report.nodeid.partition("::")[0]] += report.duration
        if node := getattr(report, "node", None):
            self._lanes[node.gateway.id] += report.duration
            self._ended[node.gateway.id] = time.monotonic() - self._began[0]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._files) < 2:
            return
        slowest = _longest_first(self._files)[:FILES_SHOWN]
        folders = _longest_first(by_folder(self._files))
        for title, rows in (
            (f"slowest {len(slowest)} of {len(self._files)} files", slowest),
            ("seconds by folder", folders),
            ("seconds by process", sorted(self._lanes.items())),
        ):
            if rows:
                terminalreporter.section(title)
            for name, seconds in rows:
                ended = f", its last test after {self._ended[name]:.1f} s" if name in self._ended else ""
                terminalreporter.write_line(f"{seconds:7.1f}s {name}{ended}")
        terminalreporter.write_line(busy_share(self._began[1], cpu_times()))


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of all processors since the machine was started."""

    busy: float
    idle: float


def cpu_times() -> CpuTimes:
    """Read the machine's counters. Time that a hypervisor took is neither busy nor idle."""
    user, nice, system, idle, waiting, irq, soft_irq = map(int, Path("/proc/stat").read_text().split()[1:8])
    ticks = os.sysconf("SC_CLK_TCK")
    return CpuTimes((user + nice + system + irq + soft_irq) / ticks, (idle + waiting) / ticks)


def busy_share(began: CpuTimes, ended: CpuTimes) -> str:
    """A line on the processors' time between two readings, other programs' included."""
    busy, idle = ended.busy - began.busy, ended.idle - began.idle
    share = busy / (busy + idle) if busy + idle else 0.0
    return f"processors of this machine: {busy:.1f} s busy, {idle:.1f} s idle ({share:.0%} busy)"


def by_folder(files: Mapping[str, float]) -> dict[str, float]:
    """Sum the seconds of files over the folders that they lie in."""
    folders: defaultdict[str, float] = defaultdict(float)
    for file, seconds in files.items():
        folders[file.rpartition("/")[0]] += seconds
    return dict(folders)


def _longest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])
