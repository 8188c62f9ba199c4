"""`make test` runs two pytest processes side by side: who takes which file, and where the time went.

A file of tests is run by one process from its first test to its last, so that what its tests share is made once. The
last process alone takes `tests/cluster` (network namespaces, control groups, containerd's socket and the node are there
once on a machine), and takes it first: it is the longest chain of tests that cannot be divided. The others begin with
the fast files. Whoever is done goes on with what is left of the rest.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

CLUSTER = "tests/cluster/"
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
        of_cluster = [file for file in self.workqueue if file.startswith(CLUSTER)]
        others = [file for file in self.workqueue if not file.startswith(CLUSTER)]
        has_cluster = node.workerinput["workerid"] == f"gw{node.workerinput['workercount'] - 1}"
        return next(iter([*of_cluster, *others] if has_cluster else others), None)


class Seconds:
    """How long each file and each process took."""

    def __init__(self) -> None:
        self._files: defaultdict[str, float] = defaultdict(float)
        self._lanes: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._files[report.nodeid.partition("::")[0]] += report.duration
        if node := getattr(report, "node", None):
            self._lanes[node.gateway.id] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slowest = sorted(self._files.items(), key=lambda item: -item[1])[:FILES_SHOWN]
        if len(self._files) < 2:
            return
        terminalreporter.section(f"slowest {len(slowest)} of {len(self._files)} files")
        for name, seconds in [*slowest, *sorted(self._lanes.items())]:
            terminalreporter.write_line(f"{seconds:7.1f}s {name}")
