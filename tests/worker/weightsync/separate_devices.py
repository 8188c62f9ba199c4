"""CPU devices that do not see each other's memory: each has staging files of its own, as accelerators have."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.weightsync.shared_memory import SHARED_MEMORY

FILES = (
    f"rljob-test-device-{os.environ.get('PYTEST_XDIST_TESTRUNUID', '')[:8]}{os.environ.get('PYTEST_XDIST_WORKER', '')}-"
)
"""Prefixes of the names of a pytest process's files: other ones run such tests at the same time."""


class SeparateDevice(CpuDevice):
    """Counts how often it was waited for, and keeps the list of files that it made."""

    own_memory = True

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.synchronized = 0
        self.files: list[Path] = []
        self._handles: dict[int, bytes] = {}

    def staging(self, nbytes: int) -> torch.Tensor:
        descriptor, name = tempfile.mkstemp(prefix=FILES, dir=SHARED_MEMORY)
        os.close(descriptor)
        tensor = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
        self.files.append(Path(name))
        self._handles[tensor.data_ptr()] = f"{nbytes} {name}".encode()
        return tensor

    def share(self, tensor: torch.Tensor) -> bytes:
        return self._handles[tensor.data_ptr()]

    def open_shared(self, handle: bytes) -> torch.Tensor:
        nbytes, name = handle.decode().split(" ", 1)
        return torch.from_file(name, shared=True, size=int(nbytes), dtype=torch.uint8)

    def synchronize(self) -> None:
        self.synchronized += 1

    def remove_files(self) -> None:
        for file in self.files:
            file.unlink(missing_ok=True)
