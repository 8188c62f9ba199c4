"""The journal: each step's samples whole, so that they can be sampled again and trained on again; one file a step."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_worker.driver.open_groups import OpenGroup
from rljob_worker.driver.step import Decision, ScoredGroup, Step
from rljob_worker.errors import UserError
from rljob_worker.host.files import WriteFailures, read_file, replacing

FOLDER = "journal"
_NAME = re.compile(r"^step-(\d{6,})\.jsonl\.gz$")


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
        groups: in the order in which they were trained on.
    """

    number: int
    weight_version: int
    attempt: int
    groups: tuple[JournalGroup, ...]

    @property
    def versions(self) -> list[int]:
        """Weights that sampled its tokens, oldest first."""
        spans = [
            span
            for one in self.groups
            for episode in one.group.group.episodes
            for span in episode.stream.spans
            if span.version is not None
        ]
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
    lines = [json.dumps(line) for line in (head, *map(_line, step.groups))]
    content = gzip.compress("".join(f"{line}\n" for line in lines).encode(), compresslevel=1)
    path = run_folder / FOLDER / f"step-{step.number:06d}.jsonl.gz"
    with failures.tolerated("journal", path):
        path.parent.mkdir(exist_ok=True)
        with replacing(path, durable=False, wanted=len(content)) as file:
            file.write(content)


def _line(scored: ScoredGroup) -> dict[str, Any]:
    answered = scored.answered
    whole = OpenGroup(answered.group, answered.seed, tuple(scored.results))
    return {"prompt_uid": answered.prompt.uid, "decision": scored.decision.value} | whole.as_json()


def journal_files(run_folder: Path) -> dict[int, Path]:
    """Step -> file, of the steps that have one."""
    folder = run_folder / FOLDER
    names = [(path, _NAME.match(path.name)) for path in folder.iterdir()] if folder.is_dir() else []
    return {int(match.group(1)): path for path, match in names if match}


def read_journal(path: Path) -> JournalStep:
    """A step of the journal; UserError where the file is damaged."""
    try:
        with gzip.open(io.BytesIO(read_file(path)), "rb") as file:
            head, *groups = [json.loads(line) for line in file]
        return JournalStep(
            int(head["step"]), int(head["weight_version"]), int(head["attempt"]), tuple(map(_group, groups))
        )
    except (OSError, EOFError, zlib.error, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged: {error}") from None


def _group(line: Mapping[str, Any]) -> JournalGroup:
    return JournalGroup(str(line["prompt_uid"]), OpenGroup.from_json(dict(line)), Decision(line["decision"]))
