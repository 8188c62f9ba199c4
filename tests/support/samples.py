"""Which of several long tests `make test` runs: one, drawn by a seed that the run prints; `make test-faults` all."""

from __future__ import annotations

import os
import random
import time

import pytest

_SEED = "RLJOB_SEED"
LONG = (
    "NPUs: two replicas, two engines",
    "NPUs: experts, one engine over both",
    "NPUs: a trainer and an engine apart",
    "pipeline stages on two nodes",
    "a replica over two nodes",
    "a replica over two nodes, engines elsewhere",
)


def give_seed() -> None:
    """Draw it, unless somebody gave it: once for all processes of a run, before they are started."""
    os.environ.setdefault(_SEED, str(time.time_ns()))


def skip_unless_drawn(name: str) -> None:
    """Skip a test of LONG that another one stands for in this run."""
    assert name in LONG
    drawn = random.Random(os.environ[_SEED]).choice(LONG)
    if drawn != name and os.environ.get("RLJOB_FAULTS") != "all":
        pytest.skip(f"{_SEED}={os.environ[_SEED]} drew {drawn!r}: make test-faults runs all")
