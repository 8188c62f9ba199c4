"""The checkpoints below a folder, as their readers find them: complete or not there, and verified first."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rljob_worker.checkpoints.state import (
    META,
    SEAL,
    DriverState,
    UnreadableError,
    UnverifiedError,
    read_state,
    unverified,
)
from rljob_worker.errors import JobError, UserError
from rljob_worker.trainer.checked_file import damage

REPLACED = ".replaced"
"""Ends the name of the old checkpoint of a step for the instant in which a new one takes its place."""
_NAME = re.compile(rf"step-(0|[1-9][0-9]{{0,17}})(?:{re.escape(REPLACED)})?")
_MOST_LOOKS = 10
"""A driver that was given up may give its folders other names while they are looked through."""
Damage = Callable[[DriverState, Path], str]
"""Finds the damage of the ranks' files of a checkpoint in its folder; empty when there is none."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder that has a `driver.json`, and whether a checksum of it, good or bad."""

    path: Path
    step: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A folder that is not used, and why: it is damaged, or it lacks a checksum of its own."""

    folder: Path
    reason: str
    damaged: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that is as it was written, or trusted to be, and what comes before it and is not used."""

    state: DriverState
    folder: Path
    verified: bool
    passed_over: Sequence[PassedOver] = ()


def step_of_folder(folder: Path) -> int | None:
    """The step of a checkpoint by its folder's name; None where it has the name of none."""
    match = _NAME.fullmatch(folder.name)
    return None if match is None else int(match[1])


def checkpoint_root(run_folder: Path, given: str | None) -> Path:
    """Folder of the checkpoints of a run: `spec.checkpoint.path` where it is given."""
    return Path(given) if given else run_folder / "checkpoints"


def damage_of_files(state: DriverState, folder: Path) -> str:
    """The `Damage` of a checkpoint, read by this process alone; OSError where that cannot be determined now."""
    return "; ".join(filter(None, (damage(folder, file) for file in state.files or ())))


class Checkpoints:
    """The complete checkpoints below one root, for reading.

    Args:
        root: their folder.
        trust_unverified: read those without a checksum of their own too, which an earlier version wrote; they come
            after all others, however new they are.
    """

    def __init__(self, root: Path, *, trust_unverified: bool = False) -> None:
        self.root = root
        self.trust_unverified = trust_unverified

    def complete_steps(self) -> list[int]:
        """Steps that have a complete checkpoint, oldest first; nothing of it is verified."""
        return sorted({one.step for one in self._there()})

    def folder(self, step: int) -> Path:
        """Folder of the checkpoint of `step`; one with a checksum of its own before one without."""
        found = self._of(step)
        return self._final(step) if found is None else found.path

    def read(self, step: int) -> DriverState:
        """State of the checkpoint of `step`.

        Raises:
            UserError: there is no complete one.
            UnverifiedError: it has no checksum of its own, and is not to be read then.
            JobError: its `driver.json` is not what a driver wrote.
            UnreadableError: it cannot be read now.
        """
        found = self._of(step)
        if found is None:
            raise self._none_of(step)
        return self._read(found)

    def whole(self, step: int, damage: Damage = damage_of_files) -> Found:
        """The checkpoint of `step`, all of it verified; JobError where a file is damaged, the rest as `read`."""
        found = self._of(step)
        if found is None:
            raise self._none_of(step)
        state = self._read(found)
        if wrong := damage(state, found.path):
            raise JobError(f"{found.path}: damaged: {wrong}")
        return Found(state, found.path, found.sealed)

    def latest(self) -> DriverState | None:
        """State of the newest complete checkpoint; errors as `read`."""
        candidates = self.candidates()
        return self._read(candidates[0]) if candidates else None

    def candidates(self) -> list[Candidate]:
        """The checkpoints that may be read, the best first: verified before trusted, then the newest.

        Raises:
            UnverifiedError: there are checkpoints, and all of them lack a checksum of their own.
        """
        return self._preferred(self._there())

    def find_whole(self, damage: Damage = damage_of_files, until: int | None = None) -> Found | None:
        """The newest checkpoint that is as it was written; None where there is none at all.

        Args:
            damage: of the ranks' files.
            until: only of this step and earlier ones.

        Raises:
            JobError: there are checkpoints, and none of them is whole, or one cannot be read now.
            UnverifiedError: as `candidates`.
        """
        for _ in range(_MOST_LOOKS):
            there = [one for one in self._there() if until is None or one.step <= until]
            found, damaged = self._first_whole(self._preferred(there), damage)
            if all(os.path.lexists(one.folder / META) for one in damaged):
                break
        if found is None and damaged:
            damaged += [] if self.trust_unverified else _without_seal(there, 0)
            listed = "\n  ".join(one.reason for one in damaged)
            raise JobError(
                f"{self.root}: no checkpoint is as it was written; put an undamaged copy in its place, or move the "
                f"folder away to begin at step 1:\n  {listed}"
            )
        if found is None or not found.verified:
            return found
        return replace(found, passed_over=[*found.passed_over, *_without_seal(there, found.state.step)])

    def _first_whole(self, candidates: Sequence[Candidate], damage: Damage) -> tuple[Found | None, list[PassedOver]]:
        damaged: list[PassedOver] = []
        for one in candidates:
            state, wrong = self._examined(one, damage)
            if state is not None and not wrong:
                return Found(state, one.path, one.sealed, damaged), damaged
            damaged.append(PassedOver(one.path, wrong))
        return None, damaged

    def _examined(self, one: Candidate, damage: Damage) -> tuple[DriverState | None, str]:
        try:
            state = self._read(one)
        except UnreadableError:
            raise
        except (JobError, UserError) as error:
            return None, str(error)
        return state, damage(state, one.path)

    def _read(self, one: Candidate) -> DriverState:
        if not one.sealed and not self.trust_unverified:
            raise UnverifiedError(unverified(one.path))
        try:
            return read_state(one.path, one.step, sealed=one.sealed)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise JobError(f"{one.path / META}: cannot be read: {error.strerror}") from None

    def _none_of(self, step: int) -> UserError:
        have = ", ".join(map(str, self.complete_steps())) or "none"
        return UserError(f"{self.root}: no complete checkpoint of step {step}; complete ones: {have}")

    def _preferred(self, there: Sequence[Candidate]) -> list[Candidate]:
        sealed = [one for one in there if one.sealed]
        if self.trust_unverified:
            return sealed + [one for one in there if not one.sealed]
        if there and not sealed:
            raise UnverifiedError("\n  ".join(unverified(one.path) for one in there))
        return sealed

    def _of(self, step: int) -> Candidate | None:
        own = [one for one in self._there() if one.step == step]
        return next((one for one in own if one.sealed), own[0] if own else None)

    def _there(self) -> list[Candidate]:
        """All that are complete, the newest first, and of one step the one that was to be replaced last."""
        found: list[tuple[int, bool, Candidate]] = []
        for entry in self.root.iterdir() if self.root.is_dir() else ():
            match = _NAME.fullmatch(entry.name)
            names: list[str] = []
            # Listed once: a folder that gets another name between two looks would seem to lack a file.
            with suppress(OSError):
                names = os.listdir(entry) if match is not None else []
            if match is not None and META in names:
                step = int(match[1])
                found.append((-step, entry.name.endswith(REPLACED), Candidate(entry, step, SEAL in names)))
        return [one for _, _, one in sorted(found, key=lambda one: one[:2])]

    def _final(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def _replaced(self, step: int) -> Path:
        return self.root / f"step-{step}{REPLACED}"


def _without_seal(there: Sequence[Candidate], step: int) -> list[PassedOver]:
    """Checkpoints of this step and later ones that cannot be verified, and so come after one that is."""
    return [
        PassedOver(one.path, unverified(one.path), damaged=False)
        for one in there
        if one.step >= step and not one.sealed
    ]
