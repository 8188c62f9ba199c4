"""Step records as TensorBoard event files."""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from rljob_api.wire.step_record import StepRecord
from rljob_worker.host.files import AppendedFile, WriteFailures

FOLDER = "tensorboard"
_VERSION = "brain.Event:2"
_WHAT = "TensorBoard events"
_numbers = itertools.count()


class TensorBoardSink:
    """Writes each record's metrics as scalars at its step; one event a record.

    The first record of an attempt tells TensorBoard to forget what earlier attempts wrote of that step and later ones.
    What cannot be written waits for the next record: TensorBoard's own writer would end with its first error.

    Args:
        run_folder: the event files are in its `tensorboard`.
        failures: where a record that had to wait is noted.
    """

    def __init__(self, run_folder: Path, failures: WriteFailures | None = None) -> None:
        self._folder = run_folder / FOLDER
        self._failures = failures or WriteFailures()
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = AppendedFile(self._folder / name)
        self._add(Event(wall_time=time.time(), file_version=_VERSION))
        self._begun = False

    def __call__(self, record: StepRecord) -> None:
        """Add one record."""
        step, time = record.step, record.time
        if not self._begun:
            self._begun = True
            self._add(Event(wall_time=time, step=step, session_log=SessionLog(status=SessionLog.SessionStatus.START)))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in record.scalars().items()]
        self._add(Event(wall_time=time, step=step, summary=Summary(value=values)))

    def _add(self, event: Event) -> None:
        if self._file.full:
            return
        framed = io.BytesIO()
        RecordWriter(framed).write(event.SerializeToString())
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
        try:
            self._file.append(framed.getvalue())
        except OSError as error:
            self._failures.note(_WHAT, error)

    def close(self) -> None:
        """Write what can be written, and close."""
        try:
            self._file.flush()
        except OSError as error:
            self._failures.note(_WHAT, error)
        self._file.close()
