"""Checkpoint folders: complete or not there at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rljob_worker.errors import UserError

_NAME = re.compile(r"^step-(0|[1-9]\d*)(?:\.replaced)?$")
_META = "driver.json"


@dataclass(frozen=True, slots=True)
class DriverState:
    """What the driver itself must remember; the trainers' files lie beside it."""

    step: int
    weight_version: int
    data_cursor: dict[str, Any]
    attempt: int
    world_size: int
    record: dict[str, Any] | None = None
    """The step's record as far as it was known; None when it stands in steps.jsonl already."""


class CheckpointStore:
    """`step-N/` folders below one root, written under another name and renamed when every file is on disk.

    Whatever instant the process or the machine dies at, each step has its old checkpoint, its new one or none: folders
    that are being written or deleted have names that no reader looks at.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self._keep = keep

    def complete_steps(self) -> list[int]:
        """Steps that have a complete checkpoint, oldest first."""
        if not self.root.is_dir():
            return []
        found = (_NAME.match(entry.name) for entry in self.root.iterdir() if (entry / _META).is_file())
        return sorted({int(match.group(1)) for match in found if match})

    def folder(self, step: int) -> Path:
        """Folder of the checkpoint of `step`."""
        final, replaced = self._final(step), self._replaced(step)
        return replaced if not final.is_dir() and replaced.is_dir() else final

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into."""
        self.root.mkdir(parents=True, exist_ok=True)
        for stale in self.root.glob("*.incomplete"):
            shutil.rmtree(stale)
        for replaced in self.root.glob("step-*.replaced"):
            final = replaced.with_suffix("")
            self._delete(replaced) if final.is_dir() else replaced.rename(final)
        folder = self.root / f"step-{step}.incomplete"
        folder.mkdir()
        return folder

    def commit(self, folder: Path, state: DriverState) -> Path:
        """Make a fully written folder the checkpoint of its step and drop the oldest beyond `keep`."""
        with open(folder / _META, "w") as file:
            json.dump(asdict(state), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(folder)
        final, replaced = self._final(state.step), self._replaced(state.step)
        if final.is_dir():
            final.rename(replaced)
        folder.rename(final)
        _sync_folder(self.root)
        if replaced.is_dir():
            self._delete(replaced)
        for step in self.complete_steps()[: -self._keep]:
            self._delete(self.folder(step))
        return final

    def read(self, step: int) -> DriverState:
        """State of the checkpoint of `step`; UserError when there is no complete one."""
        path = self.folder(step) / _META
        try:
            return DriverState(**json.loads(path.read_text()))
        except FileNotFoundError:
            have = ", ".join(map(str, self.complete_steps())) or "none"
            raise UserError(f"{self.root}: no complete checkpoint of step {step}; complete ones: {have}") from None
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: not the state of a driver: {error}") from None

    def latest(self) -> DriverState | None:
        """State of the newest complete checkpoint."""
        steps = self.complete_steps()
        return self.read(steps[-1]) if steps else None

    def _final(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def _replaced(self, step: int) -> Path:
        """Where the old checkpoint of a step is for the instant in which a new one takes its name."""
        return self.root / f"step-{step}.replaced"

    def _delete(self, folder: Path) -> None:
        """Take it from the readers first: a half deleted folder must not look complete."""
        doomed = folder.with_name(folder.name + ".incomplete")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
