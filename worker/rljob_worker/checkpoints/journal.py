"""The journal: each step's samples whole, so that they can be sampled again and trained on again; one file a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_worker.errors import UserError
from rljob_worker.host.files import WriteFailures
from rljob_worker.records.step_files import read_step_file, step_files, write_step_file
from rljob_worker.rollouts.open_groups import OpenGroup
from rljob_worker.rollouts.step import Decision, ScoredGroup, Step

FOLDER = "journal"


@dataclass(frozen=True, slots=True)
class JournalGroup:
    """A group as the step scored it."""

    prompt_uid: str
    group: OpenGroup
    decision: Decision


@dataclass(frozen=True, slots=True)
class JournalStep:
    """What a step sampled, and what became of it.

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
    groups: tuple[JournalGroup, ...]
    oldest_trained: int = 0

    @property
    def versions(self) -> list[int]:
        """Weights that sampled its tokens, oldest first."""
        episodes = [episode for one in self.groups for episode in one.group.group.episodes]
        spans = [span for episode in episodes for span in episode.stream.spans]
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


def _line(scored: ScoredGroup) -> dict[str, Any]:
    answered = scored.answered
    whole = OpenGroup(answered.group, answered.seed, tuple(scored.results))
    return {"prompt_uid": answered.prompt.uid, "decision": scored.decision.value} | whole.as_json()


def journal_files(run_folder: Path) -> dict[int, Path]:
    """Step -> file, of the steps that have one."""
    return step_files(run_folder / FOLDER)


def read_journal(path: Path) -> JournalStep:
    """A step of the journal; UserError where the file is damaged."""
    lines = read_step_file(path)
    try:
        head, *groups = lines
        return JournalStep(
            int(head["step"]),
            int(head["weight_version"]),
            int(head["attempt"]),
            tuple(map(_group, groups)),
            int(head.get("oldest_trained", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged: {error}") from None


def _group(line: Mapping[str, Any]) -> JournalGroup:
    return JournalGroup(str(line["prompt_uid"]), OpenGroup.from_json(dict(line)), Decision(line["decision"]))
