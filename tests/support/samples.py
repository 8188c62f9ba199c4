"""Which of long tests that are alike `make test` runs: one, by a seed that the run prints; `make test-faults` all."""

from __future__ import annotations

import os
import random
import time

import pytest

_SEED = "RLJOB_SEED"
ALL = os.environ.get("RLJOB_FAULTS") == "all"
"""`make test-faults`."""
GROUPS = (
    (
        "NPUs: two replicas, two engines",
        "NPUs: experts, one engine over both",
        "NPUs: a trainer and an engine apart",
        "NPUs: an engine alone",
        "pipeline stages on two nodes",
        "a replica over two nodes",
        "a replica over two nodes, engines elsewhere",
    ),
    ("doctor --deep on CPUs", "doctor --deep on NPUs"),
    ("vLLM's models", "vLLM, tensor parallel", "vLLM's hybrid models"),
    ("engines apart: the bits of one machine", "engines apart: they come and go", "an existing Ray of two nodes"),
    ("upgrades of the operator", "upgrades of KubeRay"),
    ("Ray with a token", "Ray without"),
)
"""Tests of a group go through the same code on other devices, or places."""


def give_seed() -> None:
    """Draw it, unless somebody gave it: once for all processes of a run, before they are started."""
    os.environ.setdefault(_SEED, str(time.time_ns()))


def unless_drawn(name: str) -> pytest.MarkDecorator:
    """Skips a test of a group that another one stands for in this run."""
    group = next(group for group in GROUPS if name in group)
    seed = os.environ[_SEED]
    drawn = random.Random(f"{seed} {group[0]}").choice(group)
    return _skipped(drawn != name, f"{_SEED}={seed} drew {drawn!r}")


def unless_all(reason: str) -> pytest.MarkDecorator:
    """Skips a test that is too long for `make test`, for this reason."""
    return _skipped(True, reason)


def _skipped(sample: bool, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(sample and not ALL, reason=f"{reason}: make test-faults runs it")
