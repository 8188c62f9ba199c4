"""Buckets to engines on other nodes as files of a folder that all nodes see."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from rljob_worker.errors import WeightSyncError
from rljob_worker.host.files import replacing
from rljob_worker.weightsync.plan import Bucket
from rljob_worker.weightsync.transport import SLOT_COUNT, Transport

_LOOK_SECONDS = 0.01


class SharedDisk:
    """Each bucket is a file, which is deleted when its slot is filled again: all engines have landed it then.

    Args:
        folder: on a volume that all nodes see; made by the trainer, who alone writes there.
        version: of the sync.
        slots: of this member.
        seconds: how long a worker waits for a file: trainers tell what they filled, which the first of them writes.
        first: whether it is the trainer; what earlier syncs left in the folder goes.

    Raises:
        WeightSyncError: the folder cannot be made.
    """

    def __init__(self, folder: Path, version: int, slots: Transport, seconds: float, *, first: bool) -> None:
        self._folder, self._version, self._slots, self._seconds = folder, version, slots, seconds
        if first:
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                for left in folder.iterdir():
                    left.unlink()
            except OSError as error:
                raise WeightSyncError(f"{folder}: buckets cannot be written there: {error.strerror}") from error

    def serves(self, version: int) -> bool:
        """The sync that it was made for alone: names of files are never used twice."""
        return version == self._version

    def send(self, bucket: Bucket, deadline: float, look: Callable[[], None]) -> None:
        """Write it, see `Carrier`."""
        look()
        path = self._path(bucket.index)
        with suppress(FileNotFoundError):
            self._path(bucket.index - SLOT_COUNT).unlink()
        try:
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

    def _opened(self, path: Path) -> io.BufferedReader:
        until = time.monotonic() + self._seconds
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
