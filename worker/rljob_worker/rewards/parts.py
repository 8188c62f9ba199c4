"""Values that reward functions report beside their score, as metrics of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from rljob_api.reward_parts import LEFT_OUT_KEY, PREFIX, PartNames
from rljob_worker.types import RewardResult

_NAMED = 32
"""Names without a metric that are reported; of a reward that makes a new one for each sample no more are."""


class PartMeans:
    """Means of the named parts, for the names that have a metric.

    Args:
        earlier: names of the records before, in their order.
        on_left_out: called with the names of a step that have no metric, each name once, and 32 of them at most.
    """

    def __init__(self, earlier: Iterable[str], on_left_out: Callable[[list[str]], None]) -> None:
        self._names = PartNames()
        self._names.admit(earlier)
        self._on_left_out = on_left_out
        self._told: set[str] = set()

    def metrics(self, results: Sequence[RewardResult]) -> dict[str, float]:
        """Mean of each part over the samples that have it, and how many names are left out; empty without parts."""
        values: dict[str, list[float]] = defaultdict(list)
        for result in results:
            for name, value in result.parts.items():
                values[name].append(value)
        if not values:
            return {}
        left_out = self._names.admit(sorted(values))
        self._tell(left_out)
        known = [name for name in self._names if name in values]
        means = {f"{PREFIX}{name}": sum(values[name]) / len(values[name]) for name in known}
        return {**means, LEFT_OUT_KEY: float(len(left_out))}

    def _tell(self, left_out: list[str]) -> None:
        new = [name for name in left_out if name not in self._told][: _NAMED - len(self._told)]
        if new:
            self._told.update(new)
            self._on_left_out(new)
