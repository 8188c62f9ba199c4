"""SwanLab."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence

from rljob_worker.records.trackers.tracker import Opened, Opening, Row, columns


class SwanlabTracker:
    """An experiment; offline it is kept as files that `swanlab sync` sends."""

    def __init__(self, opening: Opening) -> None:
        if opening.url is not None:
            os.environ["SWANLAB_API_HOST"] = opening.url
        # It reads its variables when it is imported.
        import swanlab

        self._swanlab = swanlab
        run_id = opening.id or secrets.token_hex(8)
        self._run = swanlab.init(
            workspace=opening.workspace,
            project=opening.project,
            name=opening.run,
            id=run_id,
            resume="allow",
            mode="offline" if opening.offline else "online",
            log_dir=opening.folder,
            config=opening.config,
        )
        self.opened = Opened(run_id, opening.folder if opening.offline else str(self._run.url))

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Same as `Tracker`."""
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Same as `Tracker`."""
        table = self._swanlab.echarts.Table()
        table.add(columns(rows), [[str(value) for value in row.values()] for row in rows])
        self._run.log({"samples": table}, step=step)

    def finish(self, failed: bool) -> None:
        """Same as `Tracker`."""
        if failed:
            self._run.finish(state="crashed", error="the job failed")
        else:
            self._run.finish()


open_tracker = SwanlabTracker
