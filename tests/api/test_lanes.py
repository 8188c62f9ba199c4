"""Assignment of test files to the processes of `make test`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.lanes import CLUSTER, LONGEST, CpuTimes, busy_share, cpu_times, next_file

REPOSITORY = Path(__file__).parents[2]
OTHERS = ["tests/api/test_crd.py", "tests/operator/test_a.py"]
OF_CLUSTER = ["tests/cluster/test_chart.py", "tests/cluster/test_why.py"]
FILES = [*OTHERS, *reversed(LONGEST), *OF_CLUSTER]


def test_the_longest_files_are_there() -> None:
    assert [file for file in LONGEST if not (REPOSITORY / file).is_file()] == []


@pytest.mark.parametrize(
    ("process", "first", "last"),
    [(0, OTHERS[0], LONGEST[-1]), (1, LONGEST[0], OTHERS[-1]), (2, OF_CLUSTER[0], OTHERS[-1])],
)
def test_each_begins_elsewhere_and_takes_the_rest_in_the_end(process: int, first: str, last: str) -> None:
    left, taken = list(FILES), []
    while (file := next_file(left, process, 3)) is not None:
        taken.append(file)
        left.remove(file)
    assert (taken[0], taken[-1]) == (first, last)
    assert all(file.startswith(CLUSTER) for file in left)
    assert (process == 2) == (not left), "the last process alone takes the cluster's"


def test_the_busy_share_is_of_the_time_between_two_readings() -> None:
    assert "30.0 s busy, 10.0 s idle (75% busy)" in busy_share(CpuTimes(100.0, 50.0), CpuTimes(130.0, 60.0))
    first = cpu_times()
    while cpu_times().busy == first.busy:  # this process is busy
        pass
    assert cpu_times().idle >= first.idle
