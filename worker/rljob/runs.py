"""A run folder as tables. It may be of a run that goes on: each call reads what is there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob.tables import Table
from rljob_api.wire.run_status import SUMMARY_FILE
from rljob_api.wire.step_record import StepRecord
from rljob_worker.errors import UserError
from rljob_worker.host.files import read_file
from rljob_worker.host.sealed_json import unsealed
from rljob_worker.records.run_files import require_run_folder
from rljob_worker.records.steps import effective_steps, read_steps
from rljob_worker.records.token_files import SampleTokens, read_tokens
from rljob_worker.records.trajectories import read_trajectories, trajectory_files


@dataclass(frozen=True, slots=True)
class Run:
    """One run."""

    folder: Path
    name: str
    manifest: dict[str, Any]

    def steps(self) -> Table:
        """A row for each step: `step`, `attempt`, `time` (Unix seconds of its end), `seconds`, `switch_seconds`,
        `applied`, and the seconds of each phase as `phase/NAME` (`phase/LANE/NAME` in a lane beside the trainers').

        A step that a restart made obsolete is not among them.
        """
        return Table([_step(record) for record in self._records() if record.is_step])

    def metrics(self) -> Table:
        """A row for each step, that of an evaluation before the first one (step 0) included: `step`, and each metric by
        its name in the records. None: not measured, or not finite.
        """
        return Table([{"step": record.step, **record.metrics} for record in self._records()])

    def trajectories(self, step: int | None = None) -> Table:
        """A row for each sample of a step (default: the newest that has any), as the trajectory file has it.

        Where tokens were kept there are `tokens` (their texts), `engine_log_probs` and `trainer_log_probs` too, lists
        of one length; None in rows whose tokens were not kept, and for the trainer's where it did not train on them.

        Raises:
            UserError: no samples of that step, naming those there are; or a file is damaged.
        """
        number, rows = read_trajectories(self.folder, step)
        tokens = read_tokens(self.folder, number)
        return Table([{"step": number, **row, **_tokens(tokens.of(row))} for row in rows])

    def trajectory_steps(self) -> list[int]:
        """Steps whose samples were written."""
        return sorted(trajectory_files(self.folder))

    def summary(self) -> dict[str, Any] | None:
        """The end of the run, as `summary.json` has it; None while it has not ended."""
        path = self.folder / SUMMARY_FILE
        try:
            content = unsealed(read_file(path).decode())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(f"{path}: damaged: {error}") from None
        if not isinstance(content, dict):
            raise UserError(f"{path}: damaged: no object")
        return content

    def _records(self) -> list[StepRecord]:
        return list(effective_steps(read_steps(self.folder)))


def load(folder: str | os.PathLike[str]) -> Run:
    """The run in a folder, ended or not.

    Raises:
        UserError: there is no such folder, or it holds no run.
    """
    path = Path(folder)
    about = require_run_folder(path)
    return Run(path, about.name, dict(about.job))


def _tokens(tokens: SampleTokens | None) -> dict[str, Any]:
    if tokens is None:
        return {}
    names = {"tokens": list(tokens.texts), "engine_log_probs": list(tokens.engine)}
    return {**names, "trainer_log_probs": tokens.trainer}


def _step(record: StepRecord) -> dict[str, Any]:
    lanes = {f"phase/{lane}/{name}": value for lane, of in record.lanes.items() for name, value in of.items()}
    return {
        "step": record.step,
        "attempt": record.attempt,
        "time": record.time,
        "seconds": record.step_seconds,
        "switch_seconds": record.switch_seconds,
        "applied": record.applied,
        **{f"phase/{name}": value for name, value in record.phases.items()},
        "phase/other": record.other,
        **lanes,
    }
