"""`rljob audit`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api.how_many import how_many
from rljob_worker.cli.manifest import folder_name
from rljob_worker.cli.trust import add_trust_argument, checkpoints_of

if TYPE_CHECKING:
    from rljob_api.wire.step_record import StepRecord
    from rljob_worker.checkpoints.reader import Checkpoints
    from rljob_worker.records.audit import PromptAudit


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "audit",
        help="prove that a run took each prompt once",
        description="Follow the prompts through a run's step records, over all restarts, and hold them against its "
        "checkpoints and trajectories: each prompt was trained on, taken by a filter or is open, exactly once. Exit "
        "code 1 where that is not so, with what is wrong.",
    )
    command.add_argument("folder", metavar="DIR", type=folder_name, help="the run folder")
    add_trust_argument(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Audit the run."""
    from rljob_api.safe_text import visible_line
    from rljob_api.wire.exit_codes import ExitCode
    from rljob_worker.errors import UserError
    from rljob_worker.records.audit import audit_prompts
    from rljob_worker.records.run_files import require_run_folder
    from rljob_worker.records.steps import read_steps

    folder: Path = arguments.folder
    store = checkpoints_of(folder, require_run_folder(folder).spec, arguments.trust_unverified)
    unreadable = list[str]()
    records = read_steps(folder)
    audit = audit_prompts([*records, *_kept_beside_checkpoint(store, records)])
    if not audit.steps:
        raise UserError(f"{folder}: no step whose record says what became of its prompts")
    checked = _checkpoints(store, audit, unreadable), _samples(folder, audit, unreadable)
    findings = audit.findings + unreadable
    for line in [*audit.notes, *findings]:
        print(visible_line(line))
    print(_conclusion(audit, *checked, len(findings)))
    return ExitCode.FAILED if findings else ExitCode.OK


def _kept_beside_checkpoint(store: Checkpoints, records: list[StepRecord]) -> list[StepRecord]:
    """The record of a step whose driver died after its checkpoint and before it could write it."""
    from rljob_api.wire.step_record import StepRecord
    from rljob_worker.errors import JobError, UserError

    written = max((record.step for record in records), default=0)
    try:
        newest = store.latest()
    except (JobError, UserError):
        # Said where checkpoints are read one by one.
        return []
    if newest is None or newest.record is None or newest.step <= written:
        return []
    return [StepRecord.parse_draft(newest.record)]


def _checkpoints(store: Checkpoints, audit: PromptAudit, unreadable: list[str]) -> int:
    from rljob_worker.errors import JobError, UserError

    steps = store.complete_steps()
    for step in steps:
        try:
            audit.check_checkpoint(step, store.read(step).data_cursor)
        except (JobError, UserError) as error:
            unreadable.append(str(error))
    return len(steps)


def _samples(folder: Path, audit: PromptAudit, unreadable: list[str]) -> int:
    from rljob_worker.errors import UserError
    from rljob_worker.records.trajectories import read_trajectories, trajectory_files

    files = trajectory_files(folder)
    for step in sorted(files):
        try:
            audit.check_samples(*read_trajectories(folder, step))
        except UserError as error:
            unreadable.append(str(error))
    return len(files)


def _conclusion(audit: PromptAudit, checkpoints: int, files: int, findings: int) -> str:
    before = (
        f" after {how_many(audit.not_numbered, 'step')} that did not number their prompts" if audit.not_numbered else ""
    )
    counts = f"{audit.trained} trained, {audit.filtered} filtered, {len(audit.open)} open"
    counts += f", {audit.skipped} skipped" if audit.skipped else ""
    saved = f"{how_many(checkpoints, 'checkpoint')}, {how_many(files, 'file')} of trajectories"
    with_ = f"{how_many(audit.steps, 'step')}{before}, {saved}"
    verdict = how_many(findings, "finding") if findings else "each exactly once"
    return f"{how_many(audit.next, 'prompt')}: {counts}; {verdict} ({with_})"
