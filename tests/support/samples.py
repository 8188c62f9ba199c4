"""Tests that `make test` leaves to `make test-faults`: the longest, and of those that are alike all but one or a few,
which are drawn by a seed that the run prints."""

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
        "NPUs: a shard of FSDP each",
        "NPUs: half of each of FSDP's rows",
        "NPUs: engines with graphs",
        "NPUs: a trainer and an engine apart",
        "NPUs: an engine alone",
        "NPUs: an engine with graphs",
        "doctor --deep on NPUs",
        "doctor --deep on CPUs",
        "pipeline stages on two nodes",
        "a replica over two nodes",
        "a replica over two nodes, engines elsewhere",
    ),
    (
        "vLLM's models",
        "vLLM's models on devices",
        "vLLM's models without slots",
        "vLLM, tensor parallel",
        "vLLM's hybrid models",
        "FSDP's rows into vLLM",
        "adapters into vLLM",
    ),
    (
        "engines apart: the bits of one machine",
        "engines apart: they come and go",
        "an existing Ray of two nodes",
        "a published set-up: Auto",
        "a published set-up: Disk",
    ),
    (
        "a node: engines' pods",
        "a node: devices",
        "a node: faults",
        "a node: strangers, a stall, upgrades",
    ),
    (
        "upgrades of the operator",
        "upgrades of KubeRay",
        "a life with KubeRay 1.5.1",
        "the chart's rights: some namespaces",
        "the chart's rights: all namespaces",
    ),
    ("Ray with a token", "Ray without"),
    ("lanes in turns: Async", "lanes in turns: Disaggregated", "lanes that are stopped"),
    (
        "staleness 0: Async",
        "staleness 0: Disaggregated",
        "left alone: partial rollout",
        "left alone: tail batching",
        "left alone: lockstep",
        "groups at the bound: Mask",
        "groups at the bound: Discard",
    ),
    (
        "episodes in Async: Together",
        "episodes in Async: Free",
        "episodes that fail",
        "episodes of two steps",
        "episodes of a guide",
    ),
    ("tools apart: staleness 0", "tools apart: kills", "agents apart: staleness 0", "agents apart: kills"),
    ("a plan held to a job: two replicas", "a plan held to a job: tensor parallel"),
    (
        "a job with a critic",
        "a job with a teacher",
        "a job with a judge",
        "a job with FSDP",
        "a job with adapters",
        "a job with adapters in its engines",
        "a job with pictures",
    ),
    (
        "a job in graph mode",
        "a job cut by tensors, then by stages",
        "a job that replays experts",
        "two halves of a job",
        "a job whose classes and files are counted",
    ),
    (
        "a job whose weights lose a bit",
        "a job with a gradient that is not finite",
        "a job with its HTTP endpoint",
        "a job that is stopped while it starts",
    ),
    (
        "a profile is added",
        "an algorithm is added",
        "a failure reason is added",
        "a policy is added",
        "an environment is added",
        "a backend is added",
        "a route is added",
    ),
    (
        "a server of environments that dies or hangs",
        "a session of environments that is lost",
        "a full server of environments",
        "sessions of environments whose driver is killed",
    ),
    ("a step of the doctor that dies", "a library's last word in a step of the doctor"),
    ("a critic on ranks", "a teacher on ranks"),
    ("a wide engine that is killed at work", "a wide engine that is killed while it loads"),
    ("strangers beside one trainer", "strangers beside two trainers"),
    ("a judge's model: killed", "a judge's model: a device of its own"),
)
"""Tests of a group go through the same code on other devices, or places, or are whole jobs that differ in a section of
their manifests."""
_T = TypeVar("_T")


def unless_drawn(name: str) -> pytest.MarkDecorator:
    """Skips a test of a group that others stand for in this run."""
    group = next(group for group in GROUPS if name in group)
    (chosen,) = _chosen(group[0], group, 1)
    return _left_out_if(name != chosen, f"RLJOB_SEED={SEED} drew {chosen!r}")


def drawn(what: str, names: Sequence[_T], count: int = 1) -> list[_T]:
    """So many of these names in their order, by the run's seed; with `make test-faults` all of them."""
    return list(names) if NONE_SKIPPED else _chosen(what, names, count)


def unless_all(reason: str) -> pytest.MarkDecorator:
    """Skips a test that is too long for `make test`, for this reason."""
    return _left_out_if(True, reason)


def _chosen(what: str, names: Sequence[_T], count: int) -> list[_T]:
    count = min(count, len(names))
    return [names[index] for index in sorted(random.Random(f"{SEED} {what}").sample(range(len(names)), count))]


def _left_out_if(condition: bool, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(condition and not NONE_SKIPPED, reason=f"{reason}: make test-faults runs it")
