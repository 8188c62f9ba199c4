"""A role of a test: processes that add."""

from __future__ import annotations

import os
import sys

from rljob_api import RLJobSpec
from rljob_worker.cluster.roles import Role


class Adder:
    """Adds to its first value."""

    def __init__(self, *, start: int) -> None:
        self._value = start

    def add(self, number: int) -> int:
        """Add a number; the sum so far."""
        self._value += number
        return self._value

    def busy_seconds(self) -> float:
        """Seconds of computing."""
        return 0.0


def _variables(spec: RLJobSpec, cache: str | None) -> dict[str, str]:
    return {"ADDS": "yes", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


ADDER = Role("adder", Adder, lambda placement, spec: [range(1)], _variables)
