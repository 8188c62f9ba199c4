"""Buckets to engines on other nodes as files of a folder that all nodes see."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from rljob_worker.errors import WeightSyncError
from rljob_worker.host.files import replacing
from rljob_worker.weightsync.plan import Bucket
from rljob_worker.weightsync.slots import SLOT_COUNT, Slots

_LOOK_SECONDS = 0.01
_WRITTEN_SECONDS = 60.0
"""Seconds until a filled bucket must be a file that this node sees: those of two buckets' writing."""


class SharedDisk:
    """Each bucket is a file, which is deleted when its slot is filled again: all engines have landed it then.

    Args:
        folder: of the meeting alone, on a volume that all nodes see; made and removed by the trainer, which alone
            writes.
        version: of the sync; names of files are used once.
        slots: of this member.
        deadline: of the sync (`time.monotonic()`).
        first: whether it is the trainer.

    Raises:
        WeightSyncError: the folder cannot be made.
    """

    def __init__(self, folder: Path, version: int, slots: Slots, deadline: float, *, first: bool) -> None:
        self._folder, self._version, self._slots = folder, version, slots
        self._deadline, self._first = deadline, first
        if first:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise WeightSyncError(f"{folder}: buckets cannot be written there: {error.strerror}") from error

    def serves(self, version: int) -> bool:
        """The sync that it was made for alone."""
        return version == self._version

    def send(self, bucket: Bucket, deadline: float, look: Callable[[], None]) -> None:
        """Write it, see `Carrier`."""
        look()
        path = self._path(bucket.index)
        try:
            self._path(bucket.index - SLOT_COUNT).unlink(missing_ok=True)
            with replacing(path, durable=False, wanted=bucket.nbytes) as file:
                file.write(self._slot(bucket).cpu().numpy().data)
        except OSError as error:
            raise WeightSyncError(f"bucket {bucket.index}: {error.filename}: {error.strerror}") from error
        if time.monotonic() > deadline:
            raise WeightSyncError(f"bucket {bucket.index}: deadline passed while it was written to {path}")

    def expect(self, bucket: Bucket) -> None:
        """Nothing: a file is looked for when it was filled."""

    def receive(self, bucket: Bucket) -> None:
        """Read it, see `Carrier`."""
        path, slot = self._path(bucket.index), self._slot(bucket)
        content = slot.numpy() if slot.device.type == "cpu" else np.empty(bucket.nbytes, np.uint8)
        try:
            with self._opened(path) as file:
                read = file.readinto(content.data)
        except OSError as error:
            raise WeightSyncError(f"bucket {bucket.index}: {path}: cannot be read: {error.strerror}") from error
        if read != bucket.nbytes:
            raise WeightSyncError(f"bucket {bucket.index}: {path} has {read} of {bucket.nbytes} bytes")
        if slot.device.type != "cpu":
            slot.copy_(torch.from_numpy(content))

    def close(self) -> None:
        """Remove the folder, where it is the trainer's."""
        if self._first:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _opened(self, path: Path) -> io.BufferedReader:
        # Trainers tell what they filled, and the first of them writes it then.
        until = min(self._deadline, time.monotonic() + _WRITTEN_SECONDS)
        while True:
            try:
                return path.open("rb")
            except FileNotFoundError:
                if time.monotonic() > until:
                    raise
            time.sleep(_LOOK_SECONDS)

    def _path(self, index: int) -> Path:
        return self._folder / f"version-{self._version}-bucket-{index}"

    def _slot(self, bucket: Bucket) -> torch.Tensor:
        return self._slots.tensor(bucket.index % SLOT_COUNT, 0, torch.uint8, (bucket.nbytes,))
