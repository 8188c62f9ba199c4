"""`driver.json`, what a checkpoint says of itself, and beside it the checksum by which it is known to be as written."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from rljob_api.wire.step_record import StepRecord
from rljob_api.wire.values import WireError, block, whole
from rljob_worker.errors import JobError, UserError
from rljob_worker.host.files import LOST, patiently, read_file, replacing
from rljob_worker.trainer.checked_file import CheckedFile

META = "driver.json"
SEAL = "driver.json.xxh3"
"""One line: xxh3_64 and size of `driver.json`. A field of the JSON could not say that the JSON is as it was written."""
_SEAL_LINE = re.compile(rb"([0-9a-f]{16})  ([1-9][0-9]{0,11})  driver\.json\n")
_MOST_SEAL_BYTES = 64
_MOST_OLD_BYTES = 2**31
"""Largest `driver.json` whose size is recorded nowhere, in bytes; with carried groups it holds every token of a
step."""


class UnreadableError(JobError):
    """A file of a checkpoint cannot be read now, which says nothing of its content."""


class UnverifiedError(UserError):
    """A checkpoint has no checksum of its own, and nobody asked for it to be read all the same."""


@dataclass(frozen=True, slots=True)
class DriverState:
    """State that the driver itself must remember; the trainers' files lie beside it."""

    step: int
    weight_version: int
    data_cursor: dict[str, Any]
    attempt: int
    world_size: int
    record: dict[str, Any] | None = None
    """The step's record as far as it was known; None when it stands in steps.jsonl already."""
    files: tuple[CheckedFile, ...] | None = None
    """Files of each rank; None in checkpoints of versions that did not record them."""
    earlier_records: tuple[dict[str, Any], ...] = ()
    """Records of steps before this one that were not surely on disk; a driver that continues writes those that are
    lost."""
    carried: tuple[dict[str, Any], ...] = ()
    """Groups that were left open, as `flow.Group.as_json`; only with partial rollout and tail batching."""

    @classmethod
    def parse(cls, content: Any) -> DriverState:
        """From the JSON of `driver.json`; WireError when it is anything else."""
        state = block(content, "it")
        record, files = state.get("record"), state.get("files")
        if record is not None:
            StepRecord.parse_draft(record)
        earlier = _listed(state.get("earlier_records", []), "earlier_records")
        for earlier_record in earlier:
            StepRecord.parse(earlier_record)
        return cls(
            step=whole(state.get("step"), "step"),
            weight_version=whole(state.get("weight_version"), "weight_version"),
            data_cursor=dict(block(state.get("data_cursor"), "data_cursor")),
            attempt=whole(state.get("attempt"), "attempt"),
            world_size=whole(state.get("world_size"), "world_size"),
            record=record,
            files=None if files is None else tuple(map(CheckedFile.parse, _listed(files, "files"))),
            earlier_records=tuple(earlier),
            carried=tuple(dict(block(one, "carried")) for one in _listed(state.get("carried", []), "carried")),
        )


def write_state(folder: Path, state: DriverState) -> None:
    """Write `driver.json` and then its checksum into a checkpoint's folder, both synced; OSError as of `replacing`."""
    content = json.dumps(asdict(state), indent=1).encode("ascii")
    for name, written in ((META, content), (SEAL, _seal(content))):
        with replacing(folder / name, wanted=len(written)) as file:
            file.write(written)


def read_state(folder: Path, step: int, *, sealed: bool) -> DriverState:
    """The state of the checkpoint of `step`.

    Args:
        folder: the checkpoint's.
        step: its number.
        sealed: whether it has a checksum, which must be that of the content; False: it is read as it is.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no `driver.json`.
        JobError: it is not what a driver wrote.
        UnreadableError: it cannot be read now.
    """
    path = folder / META
    size, xxh3 = _read_seal(folder / SEAL) if sealed else (_MOST_OLD_BYTES, "")
    content = _read(path, size)
    if sealed and (len(content), _digest(content)) != (size, xxh3):
        raise JobError(
            f"{path}: its content is not what was written ({len(content)} bytes with xxh3 {_digest(content)}; "
            f"{SEAL} says {size} with {xxh3})"
        )
    try:
        state = DriverState.parse(json.loads(content))
        if state.step != step:
            raise WireError(f"step must be that of the folder, {step}, not {state.step}")
        if sealed:
            _check_files(state)
        return state
    except (ValueError, RecursionError) as error:
        raise JobError(f"{path}: not the state of a driver: {error}") from None


def unverified(folder: Path) -> str:
    """Why a checkpoint without a checksum of its own is not read, and the way on."""
    return (
        f"{folder}: has no {SEAL}, the checksum of its {META}: an RLJob before there was one wrote it, or the file was "
        "lost; --trust-unverified (spec.checkpoint.trustUnverified: true) reads it as it is"
    )


def _check_files(state: DriverState) -> None:
    names = [file.name for file in state.files or ()]
    # A critic beside the policy has files of its own.
    counts = Counter(name.rpartition("-")[0] for name in set(names))
    if not counts or set(counts.values()) != {state.world_size}:
        raise WireError(f"files must name one file of each of the {state.world_size} ranks, not {names}")


def _seal(content: bytes) -> bytes:
    return f"{_digest(content)}  {len(content)}  {META}\n".encode("ascii")


def _digest(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)


def _read_seal(path: Path) -> tuple[int, str]:
    """Size and xxh3 of `driver.json`."""
    try:
        match = _SEAL_LINE.fullmatch(_read(path, _MOST_SEAL_BYTES))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise JobError(f"{path}: cannot be read: {error.strerror}") from None
    if match is None:
        raise JobError(f"{path}: not the checksum of {META} as a driver wrote it")
    return int(match[2]), match[1].decode("ascii")


def _read(path: Path, most: int) -> bytes:
    try:
        return patiently(lambda: read_file(path, most))
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        kind = JobError if error.errno in LOST else UnreadableError
        raise kind(f"{path}: cannot be read: {error.strerror}") from None


def _listed(values: Any, name: str) -> list[Any]:
    if isinstance(values, list):
        return values
    raise WireError(f"{name} must be a list")
