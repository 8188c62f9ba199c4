"""A hash of each row of the data, kept in the run folder: which rows are others when a run is continued."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import xxhash

from rljob_worker.data.sources import LoadedSource
from rljob_worker.host.files import replacing

logger = logging.getLogger("rljob.data")

FOLDER = "data-rows"
_FEW = 16
_SHARE = 100
_DIGEST_BYTES = 16


def most_mended(rows: int) -> int:
    """Number of rows of a source that may be others before it counts as other data: a few, or one in a hundred; half
    at most."""
    return min(max(_FEW, rows // _SHARE), rows // 2)


class RowStore:
    """Files of hashes by the fingerprint of the data that they are of.

    Args:
        run_folder: has them below.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / FOLDER

    def write(self, loaded: LoadedSource) -> None:
        """Keep what the rows of a source are, unless it is kept already; generated rows have nothing to keep."""
        path = self._path(loaded.fingerprint)
        if path.exists():
            return
        hashes = loaded.row_hashes()
        if not len(hashes):
            return
        try:
            self._folder.mkdir(exist_ok=True)
            with replacing(path) as file:
                content = _digest(loaded) + hashes.astype("<i8").tobytes()
                file.write(content + xxhash.xxh3_128_digest(content))
        except OSError as error:
            logger.warning(
                "%s: cannot be written: %s; a run that is continued cannot tell a mended row from other data",
                path, error.strerror,
            )  # fmt: skip

    def mended(self, loaded: LoadedSource, fingerprint: str) -> list[int] | None:
        """Rows of a source that are others than in the data of `fingerprint`; None: that is other data.

        The chat template, the number of rows and most rows must be the same.
        """
        try:
            content = self._path(fingerprint).read_bytes()
        except OSError:
            return None
        hashes = loaded.row_hashes()
        size = _DIGEST_BYTES + 8 * len(hashes)
        if content[:_DIGEST_BYTES] != _digest(loaded) or len(content) not in (size, size + _DIGEST_BYTES):
            return None
        content, checksum = content[:size], content[size:]
        # Files of earlier versions end without one.
        if checksum and checksum != xxhash.xxh3_128_digest(content):
            logger.warning("%s: damaged: its content is not what was written (xxh3)", self._path(fingerprint))
            return None
        before = np.frombuffer(content, dtype="<i8", offset=_DIGEST_BYTES)
        rows: list[int] = np.flatnonzero(before != hashes).tolist()
        return rows if len(rows) <= most_mended(len(hashes)) else None

    def _path(self, fingerprint: str) -> Path:
        return self._folder / f"{fingerprint}.rows"


def _digest(loaded: LoadedSource) -> bytes:
    return xxhash.xxh3_128_digest((loaded.template or "").encode())
