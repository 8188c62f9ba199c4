"""Whether each lane of a run adds up to its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def check_lanes(records: Iterable[Mapping[str, Any]], allowed: Mapping[str, set[str]]) -> dict[str, float]:
    """Hold the phases of each lane against the step.

    Args:
        records: of steps.
        allowed: by lane, the phases that it may have.

    Returns:
        By lane, the median of what is in no phase, as a share of the goal: 1 % of the step or 20 ms.
    """
    others: dict[str, list[float]] = {lane: [] for lane in allowed}
    for record in records:
        lanes = {"trainer": record["phases"], **record["lanes"]}
        assert lanes.keys() == allowed.keys()
        for name, phases in lanes.items():
            assert set(phases) <= allowed[name]
            assert all(seconds >= 0 for seconds in phases.values())
            left = record["step_seconds"] - sum(phases.values())
            assert left >= -1e-6
            others[name].append(left / max(0.01 * record["step_seconds"], 0.02))
            waits = sum(phases.get(wait, 0.0) for wait in ("batch_wait", "reward_wait", "admission_wait"))
            assert record["metrics"][f"perf/{name}_bubble"] == pytest.approx(waits / record["step_seconds"])
        assert record["other"] == pytest.approx(record["step_seconds"] - sum(record["phases"].values()))
    return {name: sorted(shares)[len(shares) // 2] for name, shares in others.items()}
