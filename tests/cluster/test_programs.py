"""The first of the tests that need them: with an empty cache the programs are built here, while other tests run."""

from __future__ import annotations

import pytest
from programs import PROGRAMS, build_all, program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


def test_all_programs_can_be_had() -> None:
    build_all()
    assert all(program(name).stat().st_mode & 0o111 for name in PROGRAMS)
