"""A fault whose text is no longer there would show nothing, and nobody runs `make test-mutants` at each change."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants.fault import Fault
from mutants.faults import FAULTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_can_be_put_in(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert all((ROOT / test.partition("::")[0]).exists() for test in fault.tests.split() if "/" in test)
