"""Step records as TensorBoard event files."""

from __future__ import annotations

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rljob_api.wire.step_record import StepRecord

FOLDER = "tensorboard"
_FLUSH_SECONDS = 10


class TensorBoardSink:
    """Writes each record's metrics as scalars at its step; one event a record.

    The first record of an attempt tells TensorBoard to forget what earlier attempts wrote of that step and later ones.
    """

    def __init__(self, run_folder: Path) -> None:
        self._writer = EventFileWriter(str(run_folder / FOLDER), flush_secs=_FLUSH_SECONDS)
        self._begun = False

    def __call__(self, record: StepRecord) -> None:
        """Add one record."""
        step, time = record.step, record.time
        if not self._begun:
            self._begun = True
            self._writer.add_event(
                Event(wall_time=time, step=step, session_log=SessionLog(status=SessionLog.SessionStatus.START))
            )
        values = [Summary.Value(tag=name, simple_value=value) for name, value in record.scalars().items()]
        self._writer.add_event(Event(wall_time=time, step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
