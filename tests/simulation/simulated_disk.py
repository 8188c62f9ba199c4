"""A folder on a file server that may lose what nobody asked it to sync, and processes that die between two calls.

What a crash leaves follows the weakest promise that file systems make: of each file what was synced, and any part of
what was appended since; of each folder the names as they were synced, or as any later call left them. Calls in one
folder keep their order, those in two do not.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_CALLS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.truncate"}
_NO_LOSS = 0.4
"""Probability that a crash loses nothing of a file or folder."""
Names = dict[str, int]
"""Inodes by name."""


class Killed(BaseException):
    """SIGKILL came between two calls to the file system."""


class Disk:
    """One folder, watched from `open` to its end.

    Args:
        root: an empty folder.
        chance: decides what a crash leaves.
    """

    def __init__(self, root: Path, chance: random.Random) -> None:
        self.root = root.resolve()
        self.kill_after: int | None = None
        """Calls after which the process that makes them dies; None: it does not."""
        self._chance = chance
        self._busy = False
        self._pins: dict[int, int] = {}
        """An open descriptor of each inode, so that its number is not used again."""
        self._folders: dict[int, list[Names]] = {}
        """Names of each folder when it was synced last, and after each change since."""
        self._changing: list[int] = []
        """Folders that the call which is being made may change."""
        self._synced: dict[int, bytes] = {}

    @contextmanager
    def open(self) -> Iterator[Disk]:
        """Watch the calls below the folder."""
        global _disk
        if not _hooked:
            sys.addaudithook(_audit)
            _hooked.append(True)
        fsync, os.fsync = os.fsync, self._sync
        self._all_is_synced()
        _disk = self
        try:
            yield self
        finally:
            _disk = None
            os.fsync = fsync
            self._forget()

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """A block whose calls are the test's own."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def crash(self) -> None:
        """Lose power: what is there afterwards is on disk."""
        with self.unwatched():
            self._note_changes()
            old = self.root.with_name(self.root.name + ".crashed")
            self.root.rename(old)
            self._leave(self._inode_of(old), self.root)
            shutil.rmtree(old)
            self._forget()
            self._all_is_synced()

    # --- the calls ------------------------------------------------------------------------------

    def called(self, event: str, args: tuple[Any, ...]) -> None:
        """A call is about to be made."""
        if self._busy or event not in _CALLS or not self._is_below(args[0]):
            return
        with self.unwatched():
            self._note_changes()
            self._changing = [inode for path in args[:2] if (inode := self._folder_of(path, args[-1])) is not None]
        if self.kill_after is not None:
            self.kill_after -= 1
            if self.kill_after < 0:
                self.kill_after = None
                raise Killed

    def _is_below(self, path: Any) -> bool:
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
        return isinstance(text, str) and (not os.path.isabs(text) or text.startswith(str(self.root)))

    def _folder_of(self, path: Any, descriptor: Any) -> int | None:
        if not self._is_below(path):
            return None
        try:
            if os.path.isabs(path):
                return os.stat(os.path.dirname(path)).st_ino
            return os.fstat(descriptor).st_ino
        except (OSError, TypeError):
            return None

    def _sync(self, file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        found = os.fstat(descriptor)
        with self.unwatched():
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if not path.is_relative_to(self.root):
                return
            self._note_changes()
            self._pin(found.st_ino, path)
            if stat.S_ISDIR(found.st_mode):
                self._folders[found.st_ino] = [self._names(found.st_ino)]
            else:
                self._synced[found.st_ino] = self._content(found.st_ino)

    # --- what is there --------------------------------------------------------------------------

    def _all_is_synced(self) -> None:
        with self.unwatched():
            self._pin(self._inode_of(self.root), self.root)
            for path in [self.root, *self.root.rglob("*")]:
                inode = self._inode_of(path)
                self._pin(inode, path)
                if path.is_dir():
                    self._folders[inode] = [self._names(inode)]
                else:
                    self._synced[inode] = self._content(inode)

    def _forget(self) -> None:
        for descriptor in self._pins.values():
            os.close(descriptor)
        self._pins, self._folders, self._synced, self._changing = {}, {}, {}, []

    def _note_changes(self) -> None:
        for folder in self._changing:
            if folder in self._folders:
                self._note(folder)
        self._changing = []

    def _note(self, folder: int) -> None:
        names = self._names(folder)
        if names != self._folders[folder][-1]:
            self._folders[folder].append(names)

    def _names(self, folder: int) -> Names:
        """Names and inodes in a folder now; what is new there is watched from now on."""
        names: Names = {}
        with suppress(FileNotFoundError), os.scandir(f"/proc/self/fd/{self._pins[folder]}") as entries:
            for entry in entries:
                inode = names[entry.name] = entry.inode()
                if inode not in self._pins:
                    self._pin(inode, Path(entry.path))
                    if entry.is_dir():
                        self._folders[inode] = [{}]
                        self._note(inode)
        return names

    def _pin(self, inode: int, path: Path) -> None:
        if inode not in self._pins:
            self._pins[inode] = os.open(path, os.O_PATH)

    @staticmethod
    def _inode_of(path: Path) -> int:
        return path.stat().st_ino

    def _content(self, inode: int) -> bytes:
        return Path(f"/proc/self/fd/{self._pins[inode]}").read_bytes()

    # --- what a crash leaves --------------------------------------------------------------------

    def _leave(self, folder: int, at: Path) -> None:
        at.mkdir()
        states = self._folders[folder]
        names = states[-1] if self._chance.random() < _NO_LOSS else self._chance.choice(states)
        for name, inode in names.items():
            if inode in self._folders:
                self._leave(inode, at / name)
            else:
                (at / name).write_bytes(self._left_of(inode))

    def _left_of(self, inode: int) -> bytes:
        synced, content = self._synced.get(inode, b""), self._content(inode)
        if self._chance.random() < _NO_LOSS:
            return content
        if not content.startswith(synced):
            return self._chance.choice([synced, content])
        return content[: self._chance.randint(len(synced), len(content))]


_disk: Disk | None = None
_hooked: list[bool] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _disk is not None:
        _disk.called(event, args)
