"""Files of this machine that a process gets, by its variables and the manifest's names."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rljob_worker.confined.files import SYSTEM, Files, is_below

_LISTS = ("PATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "VIRTUAL_ENV")
"""Variables of programs, libraries and certificates."""
_HUB = ("hub", "datasets", "modules")
"""Below HF_HOME; beside them lies its token."""


def files_of(
    around: Iterable[Path], read: Iterable[str], write: Iterable[str], never: Iterable[Path], given: Mapping[str, str]
) -> Files:
    """Files that a process with these variables needs, and those that it gets.

    Args:
        around: the working directory, folders of code.
        read: paths that the manifest names.
        write: likewise.
        never: folders of the job.
        given: variables of the process.
    """
    home = given.get("HOME", "")
    hub = given.get("HF_HOME") or os.path.join(given.get("XDG_CACHE_HOME") or f"{home}/.cache", "huggingface")
    caches = [*(os.path.join(hub, name) for name in _HUB), given.get("HF_HUB_CACHE", "")]
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix]
    whole = [path for path in _real(path for path in (*python, *caches, *read) if path) if path != "/"]
    named = [part for name in _LISTS for part in given.get(name, "").split(os.pathsep) if os.path.isabs(part)]
    folders = dict.fromkeys(_real((*sys.path, *named, *around)))
    return Files(
        read=tuple(whole),
        around=tuple(folder for folder in folders if not is_below(folder, (*SYSTEM, *whole))),
        write=tuple(_real(write)),
        never=tuple(_real((*never, os.path.join(tempfile.gettempdir(), "ray"), "/tmp/ray"))),
        home=os.path.realpath(home) if home else "",
    )


def _real(paths: Iterable[str | Path]) -> Iterator[str]:
    for path in paths:
        yield os.path.realpath(path)
