"""Files that readers find whole, whatever instant the process or the machine dies at, and on whatever disk."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOST = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.EBADMSG, errno.EUCLEAN),
        # Another thing has the file's place: a folder, a pipe, a device, a socket, a link to itself, more bytes.
        *(errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.ELOOP, errno.EFBIG),
    }
)
"""Errors of a file whose content is gone. After other errors (a stale handle) it may be read the next time."""
TEMPORARY = ".tmp"
"""Ends the name of a file that is being written."""
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""Form of an errno of libraries in Rust (safetensors, tokenizers), in exceptions that are no OSError."""
_EXPLAINED = "rljob_explained"
"""Attribute of an error that has its path and room: the innermost writer's are right."""
MOST_RUN_BYTES = 2**26
"""Size of a file that describes a run; a manifest has at most a MiB."""
_MOST_WAITING = 2**26
"""Bytes that may be kept of a file that cannot be written."""


def explained(error: OSError, path: Path, wanted: int | None = None) -> OSError:
    """The same error with what a person needs: the path, and how many bytes were wanted and are free there.

    Args:
        error: of a call that wrote, or that made room to; one of `write` or `fsync` has no path of its own.
        path: what was being written, where the error does not say.
        wanted: bytes; None where that is not known.
    """
    if isinstance(getattr(error, _EXPLAINED, None), str):
        return error
    room = [] if wanted is None else [f"{wanted} bytes wanted"]
    named = [name for name in (error.filename2, error.filename) if isinstance(name, str)]
    name = named[0] if named else str(path)
    free = _free_bytes(Path(name))
    room += [] if free is None else [f"{free} bytes free"]
    said = error.strerror or str(error)
    found = OSError(error.errno, f"{said} ({', '.join(room)})" if room else said, name)
    setattr(found, _EXPLAINED, name)
    return found


@contextmanager
def writing(path: Path, wanted: int | None = None) -> Iterator[None]:
    """A block that writes `path`; OSError as of `explained`, also where a library in Rust says it in its own way."""
    try:
        yield
    except OSError as error:
        raise explained(error, path, wanted) from error
    except Exception as error:
        rust = _RUST_ERROR.search(str(error))
        if rust is None:
            raise
        number = int(rust[1])
        raise explained(OSError(number, os.strerror(number)), path, wanted) from error


def _free_bytes(path: Path) -> int | None:
    """Bytes that this user may still write where `path` is; None where the file system does not say."""
    for folder in (path, *path.parents):
        with suppress(OSError):
            room = os.statvfs(folder)
            return room.f_bavail * room.f_frsize
    return None


def patiently(read: Callable[[], T]) -> T:
    """Call `read`, a second time where the first said that the content is gone: such errors may pass."""
    try:
        return read()
    except OSError as error:
        if error.errno not in LOST:
            raise
        return read()


def this_thread() -> str:
    """Name of this thread as the `writer` of a file that other processes may be writing."""
    return f"{os.getpid()}-{threading.get_ident()}"


@contextmanager
def replacing(
    path: Path, *, durable: bool = True, writer: str = "", wanted: int | None = None, private: bool = False
) -> Iterator[IO[bytes]]:
    """Write a file beside `path` that takes its place when the block ends well.

    Args:
        path: the file; a reader finds its old or its new content.
        durable: whether that also holds after a crash of the machine, which costs the time of the disk.
        writer: name of this writer, where there may be several at a time.
        wanted: bytes that it will have, for the message.
        private: whether its owner alone may read it, whatever the umask is.

    Raises:
        OSError: as of `explained`; what had been written is deleted, it takes room that may be needed.
    """
    temporary = path.with_name(f"{path.name}.{writer}{TEMPORARY}" if writer else path.name + TEMPORARY)
    mode = 0o600 if private else 0o666
    try:
        with writing(path, wanted):
            if private:
                # One that a crash left keeps its mode.
                temporary.unlink(missing_ok=True)
            with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                yield file
                if durable:
                    sync_file(file)
            temporary.replace(path)
    except Exception:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_whole(path: Path, text: str, *, durable: bool = True, writer: str = "", private: bool = False) -> None:
    """Write a text file by `replacing`; what UTF-8 cannot hold is escaped with backslashes."""
    content = text.encode("utf-8", "backslashreplace")
    with replacing(path, durable=durable, writer=writer, wanted=len(content), private=private) as file:
        file.write(content)


def read_file(path: Path, most: int | None = None) -> bytes:
    """Content of a file.

    Args:
        path: the file, or a link to it.
        most: bytes that it may have; None: as many as there are.

    Raises:
        OSError: as `open_file`; EFBIG where it has more than `most`.
    """
    with open_file(path) as file:
        content = file.read() if most is None else file.read(most + 1)
    if most is not None and len(content) > most:
        raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
    return content


def read_text(path: Path, errors: str = "strict") -> str:
    """Content of a text file in UTF-8; OSError as `open_file`, UnicodeDecodeError as `errors` has it."""
    return read_file(path).decode("utf-8", errors)


def open_file(path: Path) -> IO[bytes]:
    """A regular file, opened for reading.

    Raises:
        OSError: it cannot be opened; it is a pipe, which would be waited for, a device, which may never end, or a
            folder.
    """
    return open(path, "rb", opener=_open_file)


def _open_file(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", path)
    raise OSError(errno.EINVAL, "is a pipe or device, not a file", path)


def sync_file(file: IO[Any]) -> None:
    """Have the content of an open file on disk; its name is there once its folder is synced too."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk: files that were made, renamed or removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with writing(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cut_torn_line(path: Path) -> None:
    """Drop a last line without a line break: a kill interrupted it, and the next append would run into it."""
    try:
        content = read_file(path)
    except FileNotFoundError:
        return
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


class AppendedFile:
    """A file that grows at its end; what cannot be written waits, in order, and is tried again before what comes next.

    Nothing is written twice and nothing is left out: after an error the file is opened anew, and goes on behind the
    last byte that arrived. Threads may share it.

    Args:
        path: the file; only the writer changes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._waiting = bytearray()
        self._descriptor: int | None = None
        self._name_is_synced = False
        self._size = path.stat().st_size if path.exists() else 0

    @property
    def waiting(self) -> bytes:
        """Bytes that were appended and are not in the file."""
        return bytes(self._waiting)

    @property
    def full(self) -> bool:
        """Whether as much waits as may be kept in memory: the caller drops what comes next, or ends."""
        return len(self._waiting) >= _MOST_WAITING

    def append(self, data: bytes) -> None:
        """Write `data` after what still waits, normally in one system call.

        Raises:
            OSError: as of `explained`; what did not arrive waits.
        """
        with self._lock:
            self._waiting += data
            self.flush()

    def flush(self) -> None:
        """Write what waits; OSError as `append`."""
        with self._lock:
            if not self._waiting and self._descriptor is not None:
                return
            try:
                descriptor = self._opened()
                while self._waiting:
                    written = os.write(descriptor, self._waiting)
                    del self._waiting[:written]
                    self._size += written
            except OSError as error:
                self.close()
                raise explained(error, self.path, len(self._waiting)) from error

    def sync(self) -> None:
        """Have all on disk; OSError where that is not known, as of `explained`."""
        with self._lock:
            self.flush()
            assert self._descriptor is not None
            try:
                os.fsync(self._descriptor)
                if not self._name_is_synced:
                    sync_folder(self.path.parent)
                    self._name_is_synced = True
                if not os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
                    raise self._changed("another file")
            except OSError as error:
                self.close()
                raise explained(error, self.path) from error

    def close(self) -> None:
        """Close the file; it is opened again when something is appended."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                with suppress(OSError):
                    os.close(descriptor)

    def _opened(self) -> int:
        if self._descriptor is None:
            make = 0 if self._size else os.O_CREAT
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | make, 0o666)
            try:
                self._find_end(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
        return self._descriptor

    def _find_end(self, descriptor: int) -> None:
        """Find the end after an error: more bytes may have arrived than were reported, as NFS writes behind."""
        there = os.fstat(descriptor).st_size
        extra = os.pread(descriptor, len(self._waiting) + 1, self._size) if there > self._size else b""
        if there < self._size or not self._waiting.startswith(extra):
            raise self._changed(f"{there} bytes long")
        del self._waiting[: len(extra)]
        self._size += len(extra)

    def _changed(self, what: str) -> OSError:
        return OSError(
            None, f"is {what}, not the {self._size} bytes that were written: who changed it?", str(self.path)
        )


class WriteFailures:
    """Failed writes of files that the work can do without: counted, and reported once for each kind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._last: dict[str, str] = {}
        self.tell: Callable[[str, str, bool], None] = lambda what, message, first: None
        """Called with each failure: what it is, the message, and whether it is the first of its kind."""

    def counts(self) -> dict[str, int]:
        """Number of failed writes of each kind of file; thread-safe."""
        with self._lock:
            return dict(self._counts)

    def messages(self) -> dict[str, str]:
        """Last error of each kind; thread-safe."""
        with self._lock:
            return dict(self._last)

    def last(self, what: str) -> str:
        """Last error of this kind."""
        with self._lock:
            return self._last[what]

    def note(self, what: str, error: OSError) -> None:
        """Count a failure; `error` is one of `explained`."""
        message = f"{error.filename}: {error.strerror}"
        with self._lock:
            self._counts[what] = self._counts.get(what, 0) + 1
            self._last[what] = message
            first = self._counts[what] == 1
        if first:
            logger.warning("%s cannot be written, the run goes on without: %s", what, message)
        self.tell(what, message, first)

    @contextmanager
    def tolerated(self, what: str, path: Path) -> Iterator[None]:
        """A block that writes `path`, whose OSError is noted and ends there."""
        try:
            with writing(path):
                yield
        except OSError as error:
            self.note(what, error)


class _Output(io.FileIO):
    """An output of this process that loses what cannot be written instead of raising."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def keep_output_from_raising() -> None:
    """Let `print` in this process, also in libraries, lose text on a full disk or a closed pipe, and nothing else."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        try:
            if stream.fileno() != descriptor:
                continue
            stream.flush()
        except (OSError, ValueError):
            continue
        raw = _Output(descriptor, "w", closefd=False)
        lossy = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=stream.encoding, errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, lossy)


def log_tail(path: Path, name: str, lines: int) -> str:
    """The last lines of a log, each after the name of its writer; FileNotFoundError where there is none."""
    return "\n".join(f"  {name} | {line}" for line in read_text(path, "replace").splitlines()[-lines:])
