"""Fixtures shared by the tests on torch_npu's wheel: the stand-ins for CANN, built once."""

from __future__ import annotations

import pytest
from cann.build import Cann, build


@pytest.fixture(scope="session")
def cann() -> Cann:
    return build()
