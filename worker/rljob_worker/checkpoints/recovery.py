"""Recovery: checkpoints of the last completed step, and continuing from one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljob_api import RLJobSpec
from rljob_api.spec import Mode
from rljob_api.wire.run_status import ResumeChanges
from rljob_api.wire.step_record import Changed, StepRecord
from rljob_worker.checkpoints.reader import Found, PassedOver
from rljob_worker.checkpoints.state import DriverState
from rljob_worker.checkpoints.store import CheckpointStore
from rljob_worker.cluster.groups import TrainerGroup
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.errors import FencedError, JobError, PhaseDeadlineError, UserError
from rljob_worker.flow import Group, GroupPool
from rljob_worker.phases import PhaseClock
from rljob_worker.records.event_names import (
    CHANGED_AT_RESUME,
    CHECKPOINT_SET_ASIDE,
    CHECKPOINT_UNVERIFIED,
    RESHARDED,
)
from rljob_worker.records.events import EventLog
from rljob_worker.records.writer import RecordWriter
from rljob_worker.rollouts.step import Progress
from rljob_worker.trainer.checked_file import CheckedFile
from rljob_worker.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


class Recovery:
    """Saves and restores a job.

    Args:
        spec: the job.
        trainers: whose state is saved.
        calls: waits for them.
        clock: what a step took so far.
        checkpoints: where.
        records: the step's record, which a checkpoint keeps until it is written.
        pool: prompts and groups, which go back to where they were.
        progress: how far the job is.
        attempt: of the run.
        events: where a checkpoint that was set aside is noted.
        changes: what attempts changed at their resume.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        trainers: TrainerGroup,
        calls: PhaseCalls,
        clock: PhaseClock,
        checkpoints: CheckpointStore,
        records: RecordWriter,
        pool: GroupPool,
        progress: Progress,
        attempt: int,
        events: EventLog,
        changes: Sequence[ResumeChanges] = (),
    ) -> None:
        self._spec = spec
        self._trainers = trainers
        self._calls = calls
        self._clock = clock
        self._checkpoints = checkpoints
        self._records = records
        self._pool = pool
        self._progress = progress
        self._attempt = attempt
        self._events = events
        self._changes = changes
        self._requested = threading.Event()
        self.saved_step: int | None = None
        """Step of the newest checkpoint; None where there is none."""
        self.warnings: Mapping[str, str] = {}
        """Faults found when it continued, as `DriverStatus.checkpoint_warnings`; replaced as a whole."""
        self.recorded_step = 0
        """Step whose record was written last."""

    def due_checkpoint(self) -> bool:
        """After every `checkpoint.everySteps` steps, after the last one, and when asked for over HTTP."""
        step = self._progress.step
        regular = step % self._spec.checkpoint.every_steps == 0 or step == self._spec.steps
        return regular or self._requested.is_set()

    def request_checkpoint(self) -> None:
        """Take a checkpoint at the end of the running step; thread-safe."""
        self._requested.set()

    def save_checkpoint(self) -> Path:
        """Write the state of the last completed step."""
        folder = self._checkpoints.begin(self._progress.step)
        try:
            saving = self._trainers.call(Trainer.save, str(folder))
            saved = self._calls.calls.gather("checkpoint", saving, self._calls.deadline("checkpoint"))
            return self._commit(folder, [file for of_rank in saved for file in of_rank])
        except (FencedError, PhaseDeadlineError):
            # Another driver's folder by now, or one whose file system hangs.
            raise
        except JobError:
            self._checkpoints.abandon(folder)
            raise

    def _commit(self, folder: Path, files: Sequence[CheckedFile]) -> Path:
        progress = self._progress
        recorded = progress.step == self.recorded_step
        state = DriverState(
            step=progress.step,
            weight_version=progress.weight_version,
            data_cursor=self._pool.saved.cursor,
            attempt=self._attempt,
            world_size=len(self._trainers),
            record=None if recorded else self._records.draft(progress.step, self._clock.so_far()).to_json(),
            files=tuple(files),
            carried=tuple(one.as_json() for one in self._pool.saved.groups),
            earlier_records=tuple(record.to_json() for record in self._records.not_on_disk()),
        )
        saved = self._checkpoints.commit(folder, state)
        self._requested.clear()
        self.saved_step = progress.step
        return saved

    def save_before_leaving(self) -> Path | None:
        """The checkpoint that a stop request asks for, unless this step has one."""
        return None if self.saved_step == self._progress.step else self.save_checkpoint()

    def restore_latest(self) -> StepRecord | None:
        """Continue from the newest checkpoint that is as it was written, if there is one.

        Returns:
            The record of its step, where the attempt before ended between that checkpoint and the step's end.
        """
        found = self._checkpoints.newest_whole(self._damage, self._fell_back)
        return None if found is None else self.restore(found)

    def restore(self, found: Found) -> StepRecord | None:
        """Continue from a checkpoint that was verified, which may be another run's; returns as `restore_latest`."""
        state, folder = found.state, found.folder
        if not found.verified:
            self._trusted(state.step, folder)
        loading = self._trainers.call(Trainer.load, str(folder))
        loaded = self._calls.calls.gather("load", loading, self._spec.timeouts.start_seconds, until_stop=True)
        if loaded[0]:
            self._resharded(state.step, loaded[0])
        self._restore_pool(state, folder)
        progress = self._progress
        progress.step, progress.weight_version = state.step, state.weight_version
        self._note_changes(state.step, state.attempt)
        self.saved_step = self.recorded_step = state.step
        self._records.recover_written([StepRecord.parse(record) for record in state.earlier_records])
        if state.record is None or self._records.has(state.step, state.attempt):
            return None
        return StepRecord.parse_draft(state.record)

    def _restore_pool(self, state: DriverState, folder: Path) -> None:
        groups = self._carried(state, folder)
        try:
            self._pool.restore(state.data_cursor, groups, whole=self._spec.mode is Mode.DISAGGREGATED)
        except UserError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise JobError(
                f"{folder}: the data cursor is not one that a driver saved ({type(error).__name__}: {error}); move the "
                "folder away to continue from the checkpoint before it"
            ) from error

    def _note_changes(self, step: int, saved_by: int) -> None:
        """Say what is another since the checkpoint, in the log, the events and the next step's record."""
        since = [one for one in self._changes if saved_by < one.attempt <= self._attempt]
        changed = Changed(
            sorted({field for one in since for field in one.rounding}),
            sorted({field for one in since for field in one.fields}),
            self._pool.mended,
        )
        if changed.rows:
            logger.warning("rows of the data were mended, the others are unchanged: %s", ", ".join(changed.rows))
        if content := changed.to_json():
            self._records.changed(changed)
            self._events.write(CHANGED_AT_RESUME, restored=step, **content)

    def _carried(self, state: DriverState, folder: Path) -> tuple[Group, ...]:
        try:
            return tuple(map(Group.from_json, state.carried))
        except ValueError as error:
            raise JobError(
                f"{folder}: a group that goes on is not one that a driver saved ({error}); move the folder away to "
                "continue from the checkpoint before it"
            ) from error

    def _damage(self, state: DriverState, folder: Path) -> str:
        """Damage of the ranks' files of a checkpoint; the trainers share them among themselves."""
        if state.files is None:
            return ""
        asked = self._trainers.call(Trainer.damage, str(folder), state.files)
        found = self._calls.calls.gather("load", asked, self._spec.timeouts.start_seconds, until_stop=True)
        return "; ".join(filter(None, found))

    def _resharded(self, step: int, how: str) -> None:
        logger.warning(
            "the checkpoint of step %d was resharded, from %s. Weights, optimizer and data go on where they were; the "
            "trainers' generators of random numbers begin anew from spec.seed. What follows equals an undisturbed run "
            "within rounding, not bit for bit",
            step,
            how,
        )
        self._events.write(RESHARDED, restored=step, layouts=how)

    def _trusted(self, step: int, folder: Path) -> None:
        self._warn(
            "unverified",
            f"{folder} is used as it is: it has no checksum of its own, so that nothing says whether it is as it was "
            "written",
        )
        self._events.write(CHECKPOINT_UNVERIFIED, restored=step, folder=str(folder))

    def _fell_back(self, folder: Path, passed: PassedOver) -> None:
        kind, other = ("damaged", "the one before") if passed.damaged else ("unverified", "a verified one")
        self._warn("set_aside", f"{kind} checkpoint set aside as {folder}, {other} is used: {passed.reason}")
        self._events.write(CHECKPOINT_SET_ASIDE, folder=str(folder), reason=passed.reason)

    def _warn(self, what: str, message: str) -> None:
        logger.warning("%s", message)
        self.warnings = {**self.warnings, what: message}
