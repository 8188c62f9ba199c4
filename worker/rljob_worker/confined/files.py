"""Files that confined code may read and write, as lists that a kernel understands. The standard library alone.

A kernel takes folders with all that is below them and no exceptions. So where something below a folder is nobody's
business, what lies beside it is named instead, at the time when the process starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store",
    # /proc: what is private to a process there is a matter of who may trace it.
    "/proc", "/sys/devices", "/sys/fs/cgroup", "/sys/kernel/mm", "/dev/random", "/dev/urandom",
)  # fmt: skip
_SETTINGS = (
    "alternatives", "ca-certificates", "fonts", "gai.conf", "group", "host.conf", "hostname", "hosts", "ld.so.cache",
    "ld.so.conf", "ld.so.conf.d", "ld.so.preload", "locale.alias", "localtime", "magic", "matplotlibrc", "mime.types",
    "nsswitch.conf", "os-release", "passwd", "pki/ca-trust", "pki/tls/certs", "pki/tls/cert.pem", "protocols",
    "python3", "resolv.conf", "services", "ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone",
)  # fmt: skip
"""Below /etc."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
_OURS = ("rljob-ray-", "rljob-engines-", "rljob-sync-", "rljob-scratch-")
"""Folders of jobs in the temporary folder."""


class Files(NamedTuple):
    """Files that a confined process may read and write beside the system's programs and its own temporary folder."""

    read: tuple[str, ...] = ()
    """With all that is below."""
    around: tuple[str, ...] = ()
    """Folders to be read but for hidden files right in them, and for `never`."""
    write: tuple[str, ...] = ()
    """Likewise to be written."""
    never: tuple[str, ...] = ()
    """Files that `around` leaves out wherever they are below."""
    home: str = ""
    """The user's, of which hidden files are left out likewise."""


def readable(files: Files) -> Iterator[str]:
    """All paths that it may read and execute."""
    yield from SYSTEM
    yield from (f"/etc/{name}" for name in _SETTINGS)
    yield from files.read
    for folder in files.around:
        yield from _around(folder, files) if os.path.isdir(folder) else [folder]


def listable(files: Files) -> Iterator[str]:
    """Folders whose entries' names it may read, below them too: Python imports from a folder that it can list alone."""
    yield from (folder for folder in files.around if folder != "/" and os.path.isdir(folder))


def writable(files: Files, own: str) -> Iterator[str]:
    """All paths that it may write, its own folder among them."""
    yield from (*_DEVICES, own, *files.write)


def _around(folder: str, files: Files) -> list[str]:
    """The folder, or what lies in it where not all may be read; links right in it are followed."""
    if folder == "/":
        return []
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    roots = (*files.around, files.home)
    hides = folder in roots
    left_out = {e.path for e in entries if e.name.startswith(_OURS) or (hides and e.name.startswith("."))}
    left_out |= {e.path for e in entries if e.is_symlink() and _leads_to_more(e.path, files)}
    left_out |= set(files.never)
    # A folder that hides something of its own may lie below one that does not.
    special = [path for path in (*files.never, *roots) if path.startswith(f"{folder}/")]
    shown = [entry for entry in entries if entry.path not in left_out]
    if not special and len(shown) == len(entries):
        return [folder, *(entry.path for entry in shown if hides and entry.is_symlink())]
    found = []
    for entry in shown:
        inner = any(is_below(path, (entry.path,)) for path in special)
        found += _around(entry.path, files) if inner else [entry.path]
    return found


def _leads_to_more(link: str, files: Files) -> bool:
    """Whether a link leads to a folder in which there is something that nobody may read."""
    target = os.path.realpath(link)
    return target == "/" or any(is_below(path, (target,)) for path in (*files.never, files.home) if path)


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether it is one of the folders, or in one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
