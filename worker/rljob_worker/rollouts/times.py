"""Answer times of environments, and their failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rljob_api.metrics import ENVIRONMENT_FAILURE_KEYS
from rljob_worker.environments.base import FailureKind


@dataclass(slots=True)
class EnvironmentTimes:
    """Seconds from asking an environment to having its answer, what it waited for others included."""

    resets: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    failures: Counter[FailureKind] = field(default_factory=Counter)
    """Processes of environments that were lost (infra), and answers that were none or others than before."""

    def __add__(self, other: EnvironmentTimes) -> EnvironmentTimes:
        """Both together."""
        failures = self.failures.copy()
        failures.update(other.failures)
        return EnvironmentTimes(self.resets + other.resets, self.steps + other.steps, failures)

    def metrics(self) -> dict[str, float]:
        """Mean, 99th percentile and maximum of the seconds that there are, and the number of failures of each kind."""
        return dict(self._metrics())

    def _metrics(self) -> Iterator[tuple[str, float]]:
        for name, seconds in (("reset", self.resets), ("step", self.steps)):
            if seconds:
                values = np.array(seconds)
                yield f"perf/env_{name}_time/mean", float(values.mean())
                yield f"perf/env_{name}_time/p99", float(np.percentile(values, 99))
                yield f"perf/env_{name}_time/max", float(values.max())
        for kind in FailureKind:
            yield ENVIRONMENT_FAILURE_KEYS[kind], float(self.failures[kind])
