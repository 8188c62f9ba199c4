"""Tests that `make test` leaves to `make test-faults`: the longest, and of those that are alike all but one, which
is drawn by a seed that the run prints."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import TypeVar

import pytest

SEED = int(os.environ.setdefault("RLJOB_SEED", str(time.time_ns())))
"""Seed of all draws of a run, once for all of its processes: the first of them draws it, unless it is given."""
ALL = os.environ.get("RLJOB_FAULTS") == "all"
"""`make test-faults`, which runs every file of tests that asks for it here."""
NONE_SKIPPED = ALL or os.environ.get("RLJOB_FAULTS") == "named"
"""`make test-mutants` too names the tests that it wants."""
GROUPS = (
    (
        "NPUs: two replicas, two engines",
        "NPUs: experts, one engine over both",
        "NPUs: a trainer and an engine apart",
        "NPUs: an engine alone",
        "doctor --deep on NPUs",
        "doctor --deep on CPUs",
        "pipeline stages on two nodes",
        "a replica over two nodes",
        "a replica over two nodes, engines elsewhere",
    ),
    (
        "vLLM's models",
        "vLLM's models on devices",
        "vLLM, tensor parallel",
        "vLLM's hybrid models",
        "FSDP's rows into vLLM",
        "adapters into vLLM",
    ),
    (
        "engines apart: the bits of one machine",
        "engines apart: they come and go",
        "an existing Ray of two nodes",
    ),
    (
        "a node: engines' pods",
        "a node: devices",
        "a node: faults",
        "a node: strangers, a stall, upgrades",
    ),
    ("a published set-up: Auto", "a published set-up: Disk"),
    ("upgrades of the operator", "upgrades of KubeRay", "a life with KubeRay 1.5.1"),
    ("the chart's rights: some namespaces", "the chart's rights: all namespaces"),
    ("Ray with a token", "Ray without"),
    ("lanes in turns: Async", "lanes in turns: Disaggregated"),
    ("staleness 0: Async", "staleness 0: Disaggregated"),
    ("groups at the bound: Mask", "groups at the bound: Discard"),
    ("left alone: partial rollout", "left alone: tail batching"),
    ("a plan held to a job: two replicas", "a plan held to a job: tensor parallel"),
)
"""Tests of a group go through the same code on other devices, or places."""
_T = TypeVar("_T")


def unless_drawn(name: str) -> pytest.MarkDecorator:
    """Skips a test of a group that another one stands for in this run."""
    group = next(group for group in GROUPS if name in group)
    drawn = random.Random(f"{SEED} {group[0]}").choice(group)
    return _left_out_if(drawn != name, f"RLJOB_SEED={SEED} drew {drawn!r}")


def drawn(what: str, names: Sequence[_T], count: int = 1) -> list[_T]:
    """So many of these names in their order, by the run's seed; with `make test-faults` all of them."""
    if NONE_SKIPPED or count >= len(names):
        return list(names)
    return [names[index] for index in sorted(random.Random(f"{SEED} {what}").sample(range(len(names)), count))]


def unless_all(reason: str) -> pytest.MarkDecorator:
    """Skips a test that is too long for `make test`, for this reason."""
    return _left_out_if(True, reason)


def _left_out_if(condition: bool, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(condition and not NONE_SKIPPED, reason=f"{reason}: make test-faults runs it")
