"""Which of long tests that are alike `make test` runs: one, by a seed that the run prints; `make test-faults` all."""

from __future__ import annotations

import os
import random
import time

import pytest

_SEED = "RLJOB_SEED"
GROUPS = (
    (
        "NPUs: two replicas, two engines",
        "NPUs: experts, one engine over both",
        "NPUs: a trainer and an engine apart",
        "pipeline stages on two nodes",
        "a replica over two nodes",
        "a replica over two nodes, engines elsewhere",
    ),
    ("doctor --deep on CPUs", "doctor --deep on NPUs"),
)
"""Tests of a group go through the same code on other devices, or places."""


def give_seed() -> None:
    """Draw it, unless somebody gave it: once for all processes of a run, before they are started."""
    os.environ.setdefault(_SEED, str(time.time_ns()))


def skip_unless_drawn(name: str) -> None:
    """Skip a test of a group that another one stands for in this run."""
    group = next(group for group in GROUPS if name in group)
    drawn = random.Random(os.environ[_SEED]).choice(group)
    if drawn != name and os.environ.get("RLJOB_FAULTS") != "all":
        pytest.skip(f"{_SEED}={os.environ[_SEED]} drew {drawn!r}: make test-faults runs all")
