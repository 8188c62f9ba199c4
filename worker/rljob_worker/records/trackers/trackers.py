"""All trackers of a run."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rljob_api import RLJobSpec
from rljob_api.wire.step_record import StepRecord
from rljob_worker.confined.loading import whole_characters
from rljob_worker.records.trackers.feed import Delivery, TrackerFeed
from rljob_worker.records.trackers.packages import python_with
from rljob_worker.records.trackers.tracker import Row

logger = logging.getLogger(__name__)

_CELL_CHARACTERS = 10_000
_COLUMNS = ("prompt", "label", "response", "reward", "finish_reason", "response_tokens")
"""Columns of a sample's trajectory; the reward's parts are behind them."""


class Trackers:
    """Hands step records and samples to the trackers of `spec.records.trackers`; nothing here waits, but `close`.

    Args:
        run_folder: of the run.
        spec: the job.
        run: name of the run where a tracker has none.
        on_event: gets the address of each run.
        python: interpreter that has the packages; None: the one of `python_with`.
    """

    def __init__(
        self, run_folder: Path, spec: RLJobSpec, run: str, on_event: Callable[[str], None], python: str | None = None
    ) -> None:
        config = config_of(spec)
        self._feeds = [
            (
                tracker,
                TrackerFeed(
                    run_folder,
                    tracker.name,
                    {
                        "project": tracker.project,
                        "run": tracker.run or run,
                        "workspace": tracker.workspace,
                        "url": tracker.url,
                        "offline": tracker.offline,
                        "config": config,
                    },
                    tracker.finish_seconds,
                    on_event,
                    python or python_with(tracker.name) or sys.executable,
                ),
            )
            for tracker in spec.records.trackers
        ]

    def __call__(self, record: StepRecord) -> None:
        """Hand over a step's scalars."""
        scalars = record.scalars()
        for _, feed in self._feeds:
            feed.send({"step": record.step, "time": record.time, "scalars": scalars})

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Hand over the first samples of a step, where it is their turn; `samples` as in the trajectories."""
        for tracker, feed in self._feeds:
            if tracker.samples and step % tracker.samples_every_steps == 0:
                rows = [row_of(sample) for sample in samples[: tracker.samples]]
                feed.send({"step": step, "samples": rows})

    def close(self, failed: bool, seconds: float = math.inf) -> list[Delivery]:
        """Let all finish at the same time, each within its own `finishSeconds` and `seconds`; says what is missing."""
        feeds, self._feeds = self._feeds, []
        now = time.monotonic()
        for _, feed in feeds:
            feed.finish(failed)
        deliveries = [feed.close(now + min(tracker.finish_seconds, seconds)) for tracker, feed in feeds]
        for delivery in deliveries:
            if delivery.said():
                logger.warning("%s", delivery.said())
        return deliveries


def config_of(spec: RLJobSpec) -> dict[str, Any]:
    """The job as trackers show it; variables of the environment stay where they are."""
    return spec.model_dump(mode="json", by_alias=True, exclude={"environment"}, exclude_none=True)


def row_of(sample: Mapping[str, Any]) -> Row:
    """A line of a sample table."""
    cells = {name: sample.get(name) for name in _COLUMNS}
    cells["reward_parts"] = sample.get("reward_parts") or {}
    return {name: _cell(value) for name, value in cells.items()}


def _cell(value: Any) -> str | float | int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return whole_characters(text[:_CELL_CHARACTERS])
