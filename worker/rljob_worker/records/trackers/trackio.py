"""Trackio."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rljob_worker.records.trackers.tracker import Opened, Opening, Row, columns


class TrackioTracker:
    """A run in a database of the run folder, or on a server of one's own where there is an address."""

    def __init__(self, opening: Opening) -> None:
        os.environ["TRACKIO_DIR"] = opening.folder
        # It reads its variables when it is imported.
        import trackio

        self._trackio = trackio
        self._project = opening.project
        # Its runs are known by their names alone.
        name = opening.id or opening.run
        if opening.offline:
            for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(variable, None)
        self._run = trackio.init(
            project=opening.project,
            name=name,
            server_url=opening.url,
            resume="allow" if opening.id else "never",
            config=opening.config,
            private=True,
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        self.opened = Opened(str(self._run.name), opening.url or opening.folder)

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Same as `Tracker`."""
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Same as `Tracker`."""
        table = self._trackio.Table(columns=columns(rows), data=[list(row.values()) for row in rows])
        self._run.log({"samples": table}, step=step)

    def finish(self, failed: bool) -> None:
        """Same as `Tracker`."""
        self._run.finish()
        # What a server did not take is put aside with nothing but a warning.
        waiting = self._trackio.SQLiteStorage.get_pending_logs(self._project)
        if waiting:
            count = len(waiting["logs"])
            raise ConnectionError(
                f"the server did not take all: {count} logs wait for the next attempt, or trackio.init"
            )


open_tracker = TrackioTracker
