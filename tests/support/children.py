"""Processes that a test has started: pytest has children of tests before it, and servers that tests share."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

Children = Callable[..., list[psutil.Process]]


@pytest.fixture
def children() -> Children:
    """Living processes that were started since; `recursive=True`: those below them too."""
    before = set(psutil.Process().children(recursive=True))

    def since(recursive: bool = False) -> list[psutil.Process]:
        return [one for one in psutil.Process().children(recursive) if one not in before and _lives(one)]

    return since


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
