"""Weights & Biases."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence

import wandb

from rljob_worker.records.trackers.tracker import Opened, Opening, Row, columns


class WandbTracker:
    """A run that keeps the id which this process chose for it.

    The step is a metric of its own that all others are drawn over: W&B's own step may not go back, and a step that was
    run again after a restart would be left out.
    """

    def __init__(self, opening: Opening) -> None:
        if opening.url is not None:
            os.environ["WANDB_BASE_URL"] = opening.url
        run_id = opening.id or secrets.token_hex(8)
        self._run = wandb.init(
            entity=opening.workspace,
            project=opening.project,
            name=opening.run,
            id=run_id,
            resume="allow",
            mode="offline" if opening.offline else "online",
            dir=opening.folder,
            config=opening.config,
            allow_val_change=True,
            settings=wandb.Settings(
                console="off", disable_code=True, disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.opened = Opened(run_id, self._run.dir if opening.offline else str(self._run.url))

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Same as `Tracker`."""
        self._run.log({**values, "step": step})

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Same as `Tracker`."""
        table = wandb.Table(columns=columns(rows), data=[list(row.values()) for row in rows])
        self._run.log({"samples": table, "step": step})

    def finish(self, failed: bool) -> None:
        """Same as `Tracker`."""
        self._run.finish(exit_code=1 if failed else 0)


open_tracker = WandbTracker
