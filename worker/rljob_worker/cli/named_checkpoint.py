"""`--checkpoint`: a run folder or one of its checkpoints, resolved to a checkpoint that was verified."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_worker.cli.trust import checkpoints_of, say
from rljob_worker.errors import UserError, no_folder

if TYPE_CHECKING:
    from rljob_worker.checkpoints.reader import Found


@dataclass(frozen=True, slots=True)
class NamedCheckpoint:
    """A checkpoint, and the run that it is of.

    Attributes:
        found: it, verified.
        run_folder: of its run.
        spec: of its run, as `run.json` has it.
    """

    found: Found
    run_folder: Path
    spec: dict[str, Any]


def named_checkpoint(folder: Path, step: int | None, trust_unverified: bool) -> NamedCheckpoint:
    """The checkpoint that the command line names.

    Args:
        folder: `--checkpoint`: a run folder, or one of its checkpoints/step-N.
        step: `--step`; None: the newest, or that of the folder.
        trust_unverified: `--trust-unverified`.

    Raises:
        UserError: there is none; names the option and what would do.
    """
    from rljob_worker.records.run_files import require_run_folder

    run_folder, step = _run_and_step(folder, step)
    spec = require_run_folder(run_folder).spec
    store = checkpoints_of(run_folder, spec, trust_unverified)
    found = store.find_whole() if step is None else store.whole(step)
    if found is None:
        raise UserError(
            f"--checkpoint: {store.root}: no complete checkpoint yet; `rljob save {run_folder}` has a running job save "
            "one; without --checkpoint the weights are those that spec.model begins with"
        )
    say(found)
    return NamedCheckpoint(found, run_folder, spec)


def is_run(folder: Path) -> bool:
    """Whether it is a run folder."""
    from rljob_api.wire.run_status import RUN_FILE

    return (folder / RUN_FILE).is_file()


def _run_and_step(folder: Path, step: int | None) -> tuple[Path, int | None]:
    from rljob_worker.checkpoints.reader import step_of_folder

    if not folder.is_dir():
        raise UserError(f"--checkpoint: {no_folder(folder)}; needed is a run folder")
    if is_run(folder):
        return folder, step
    of_folder = step_of_folder(folder.resolve())
    if of_folder is not None:
        run_folder = folder.resolve().parent.parent
        if not is_run(run_folder):
            raise UserError(
                f"--checkpoint: {folder}: {run_folder} is not its run folder (spec.checkpoint.path is elsewhere); name "
                f"the run folder and --step {of_folder}"
            )
        if step not in (None, of_folder):
            raise UserError(f"--step: {step}, and --checkpoint is the one of step {of_folder}; leave one of them out")
        return run_folder, of_folder
    if (folder / "config.json").is_file():
        raise UserError(f"--checkpoint: {folder} is a model folder, not one of a run; spec.model.path={folder} uses it")
    raise UserError(f"--checkpoint: {folder} is no run folder and no checkpoint of one (step-N)")
