"""ClearML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rljob_worker.records.trackers.tracker import Opened, Opening, Row, columns


class ClearmlTracker:
    """A task; offline, a session of each attempt, which `Task.import_offline_session` joins to one task."""

    def __init__(self, opening: Opening) -> None:
        if opening.url is not None:
            os.environ["CLEARML_API_HOST"] = opening.url
        os.environ["CLEARML_CACHE_DIR"] = opening.folder
        # It reads its variables when it is imported.
        from clearml import Task

        if opening.offline:
            Task.set_offline(True)
        continued = None if opening.offline else opening.id
        self._task = Task.init(
            project_name=opening.project,
            task_name=opening.run,
            reuse_last_task_id=continued or False,
            # The steps' own numbers, not counted on from the last one.
            continue_last_task=0 if continued else False,
            auto_connect_arg_parser=False,
            # The job's code is not this process's.
            auto_connect_frameworks={"detect_repository": False},
            auto_connect_streams=False,
            auto_resource_monitoring=False,
        )
        self._task.connect(opening.config, name="job")
        self._logger = self._task.get_logger()
        place = self._task.get_offline_mode_folder() if opening.offline else self._task.get_output_log_web_page()
        self.opened = Opened(continued or str(self._task.id), str(place))

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Same as `Tracker`; a metric's first part is the plot, the rest the series in it."""
        for name, value in values.items():
            plot, _, series = name.partition("/")
            self._logger.report_scalar(plot, series or plot, value, step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Same as `Tracker`."""
        table = [columns(rows), *(list(row.values()) for row in rows)]
        self._logger.report_table("samples", "responses", iteration=step, table_plot=table)

    def finish(self, failed: bool) -> None:
        """Same as `Tracker`."""
        if failed:
            self._task.mark_failed(status_reason="the job failed")
        self._task.close()


open_tracker = ClearmlTracker
