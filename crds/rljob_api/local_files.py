"""Files that a manifest names beside itself: relative paths mean the manifest's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rljob_api.base import ApiModel
from rljob_api.blocks import fields_of
from rljob_api.job import RLJob
from rljob_api.rewards import function_file
from rljob_api.spec import (
    AgentSpec,
    ChatSpec,
    OversamplingSpec,
    RewardFunction,
    RLJobSpec,
    TextEnvironmentSpec,
    ToolSpec,
)

_NAMED_BY_PYTHON = (AgentSpec, RewardFunction, TextEnvironmentSpec, ToolSpec)
Block = TypeVar("Block", bound=ApiModel)
Change = Callable[[str, str], str]
"""From a field's path in the manifest and the file that it names to the file that it shall name."""


def local_files(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    """The files of a spec, each with its field's path."""
    found: list[tuple[str, str]] = []

    def note(field: str, file: str) -> str:
        found.append((field, file))
        return file

    _changed(spec, "spec", note)
    yield from found


def resolved(job: RLJob, folder: Path) -> RLJob:
    """The job with absolute paths of its files, relative ones being below `folder`.

    Raises:
        FileNotFoundError: there is no such file below the folder; its text names field and file. Absolute paths are not
            looked at: they may be another machine's.
    """

    def absolute(field: str, file: str) -> str:
        try:
            path = Path(file).expanduser()
        except RuntimeError:
            raise FileNotFoundError(f"{field}: {file}: there is no such user, or the user has no home folder") from None
        if path.is_absolute():
            return str(path)
        path = folder / path
        try:
            path = path.resolve()
            found = path.is_file()
        except (OSError, RuntimeError):
            # A link that leads back to itself, or a name that is too long for one.
            found = False
        if not found:
            raise FileNotFoundError(f"{field}: {file}: there is no file {path}")
        return str(path)

    return job.model_copy(update={"spec": _changed(job.spec, "spec", absolute)})


def _changed(block: Block, at: str, change: Change) -> Block:
    changes: dict[str, Any] = {}
    model: type[ApiModel] = type(block)
    for alias, field in fields_of(model).items():
        value = getattr(block, field.name)
        if isinstance(value, ApiModel):
            changes[field.name] = _changed(value, f"{at}.{alias}", change)
        elif field.block is not None and isinstance(value, list):
            changes[field.name] = [_changed(item, f"{at}.{alias}[{i}]", change) for i, item in enumerate(value)]
    if isinstance(block, _NAMED_BY_PYTHON) and (named := function_file(block.python)):
        file, function = named
        changes["python"] = f"{change(f'{at}.python', file)}:{function}"
    if isinstance(block, OversamplingSpec) and (named := function_file(block.function)):
        changes["function"] = f"{change(f'{at}.function', named[0])}:{named[1]}"
    if isinstance(block, ChatSpec) and block.template_file is not None:
        changes["template_file"] = change(f"{at}.templateFile", block.template_file)
    changes = {name: value for name, value in changes.items() if value != getattr(block, name)}
    return block.model_copy(update=changes) if changes else block
