"""The journal: each step's samples whole, so that they can be sampled again and trained on again; one file a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rljob_worker.errors import UserError
from rljob_worker.flow import Decision, Group
from rljob_worker.host.files import WriteFailures
from rljob_worker.records.step_files import read_step_file, step_files, step_of, write_step_file
from rljob_worker.rollouts.step import Step

FOLDER = "journal"


@dataclass(frozen=True, slots=True)
class JournalStep:
    """Samples of a step, and their fate.

    Attributes:
        number: of the step.
        weight_version: that it began to train with.
        attempt: of the run that wrote it.
        oldest_trained: tokens of weights before these were left out of the loss.
        groups: in the order in which they were trained on.
    """

    number: int
    weight_version: int
    attempt: int
    groups: tuple[Group, ...]
    oldest_trained: int = 0

    @property
    def versions(self) -> list[int]:
        """Weights that sampled its tokens, oldest first."""
        episodes = [episode for one in self.groups for episode in one.episodes]
        spans = [span for episode in episodes for stream in episode.streams for span in stream.spans]
        return sorted({span.version for span in spans if span.version is not None})


def write_journal(run_folder: Path, step: Step, attempt: int, failures: WriteFailures) -> None:
    """Write a step's samples; one that cannot be written is noted in `failures`.

    Args:
        run_folder: the run's folder.
        step: after its training.
        attempt: of the run.
        failures: where it is noted.
    """
    head = {"step": step.number, "weight_version": step.weight_version, "attempt": attempt}
    if step.oldest_trained:
        head["oldest_trained"] = step.oldest_trained
    write_step_file(run_folder / FOLDER, step.number, (head, *map(_line, step.groups)), "journal", failures)


def _line(group: Group) -> dict[str, Any]:
    assert group.decision is not None
    whole = replace(group, deferred_at=None)
    return {"prompt_uid": group.prompt_uid, "decision": group.decision.value} | whole.as_json()


def journal_files(run_folder: Path) -> dict[int, Path]:
    """Step -> file, of the steps that have one."""
    return step_files(run_folder / FOLDER)


def read_journal(path: Path) -> JournalStep:
    """A step of the journal; UserError where the file is damaged."""
    lines = read_step_file(path)
    try:
        head, *groups = lines
        if int(head["step"]) != step_of(path):
            raise ValueError(f"it is of step {head['step']}")
        return JournalStep(
            int(head["step"]),
            int(head["weight_version"]),
            int(head["attempt"]),
            tuple(map(_group, groups)),
            int(head.get("oldest_trained", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged: {error}") from None


def _group(line: Mapping[str, Any]) -> Group:
    return replace(Group.from_json(dict(line)), prompt_uid=str(line["prompt_uid"]), decision=Decision(line["decision"]))
