"""Lanes of a run, whose phases add up to its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

TRAINER = {"batch_wait", "ref_log_probs", "log_probs", "actor_train", "update_weights", "checkpoint"}
ENGINE = {"rollout", "reward_wait", "admission_wait", "update_weights", "eval"}
"""Phases of the two lanes."""


def check_lanes(records: Iterable[Mapping[str, Any]], allowed: Mapping[str, set[str]]) -> None:
    """Hold the phases of each lane against the step; how much may be in no phase is `benchmarks/lanes.py`'s to say.

    Args:
        records: of steps.
        allowed: by lane, the phases that it may have.
    """
    for record in records:
        lanes = {"trainer": record["phases"], **record["lanes"]}
        assert lanes.keys() == allowed.keys()
        for name, phases in lanes.items():
            assert set(phases) <= allowed[name]
            assert all(seconds >= 0 for seconds in phases.values())
            assert record["step_seconds"] - sum(phases.values()) >= -1e-6
            waits = sum(phases.get(wait, 0.0) for wait in ("batch_wait", "reward_wait", "admission_wait"))
            assert record["metrics"][f"perf/{name}_bubble"] == pytest.approx(waits / record["step_seconds"])
        assert record["other"] == pytest.approx(record["step_seconds"] - sum(record["phases"].values()))
