"""What the tests on torch_npu's wheel share: the stand-ins for CANN, built once, and a process's environment on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cann.build import Cann, build

HERE = Path(__file__).parent
Environment = Callable[..., dict[str, str]]


@pytest.fixture(scope="session")
def cann() -> Cann:
    return build()
