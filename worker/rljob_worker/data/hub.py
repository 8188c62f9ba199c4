"""Fetching from the Hugging Face and ModelScope hubs, through their own client libraries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljob_api.spec import Hub
from rljob_worker.errors import JobError, UserError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

_REFUSALS = {
    "RepositoryNotFoundError",
    "RevisionNotFoundError",
    "RemoteEntryNotFoundError",
    "GatedRepoError",
    "DisabledRepoError",
    "DatasetNotFoundError",
    "DataFilesNotFoundError",
}
"""A hub's answers that stay the same; by name, since each client has its own. All else that is an OSError passes."""


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id: `name` or `owner/name`."""
    return _HUB_ID.fullmatch(name) is not None


def snapshot(
    name: str, hub: Hub, field: str, *, revision: str | None = None, patterns: Sequence[str] | None = None
) -> Path:
    """Local folder with the files of a model repository (those that match `patterns`, default all).

    Raises UserError, naming the manifest's `field` (such as `spec.model`), when there is no such repository or the
    hub's client is not installed, and JobError when the hub cannot be reached.
    """
    arguments: dict[str, Any] = {"revision": revision} if revision else {}
    if patterns is not None:
        arguments["allow_patterns"] = list(patterns)
    if hub is Hub.MODEL_SCOPE:
        download = modelscope(field).snapshot_download
    else:
        from huggingface_hub import snapshot_download as download
    try:
        return Path(download(name, **arguments))
    except Exception as error:
        raise hub_failure(name, hub, field, error) from error


def modelscope(field: str) -> Any:
    """The `modelscope` package; UserError naming it where it is not installed."""
    try:
        import modelscope
    except ImportError as error:
        raise UserError(
            f"{field}.hub: ModelScope needs the Python package 'modelscope', which does not import here ({error}): "
            "install it in the worker image (pip install modelscope), or use hub: HuggingFace"
        ) from error
    return modelscope


def hub_failure(name: str, hub: Hub, field: str, error: Exception) -> JobError | UserError:
    """One error for whatever a hub's client raised: a JobError where the hub may answer another time."""
    reason = str(error).strip().splitlines() or [""]
    message = (
        f"{field}.path: {name!r} is not a local path, and fetching it from {hub.value} failed: "
        f"{type(error).__name__}: {reason[0]}"
    )
    refused = any(kind.__name__ in _REFUSALS for kind in type(error).__mro__)
    # The Hugging Face clients let what httpx raises in the middle of a download through, which is no OSError.
    passes = isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("httpx", "httpcore")
    return JobError(message) if passes and not refused else UserError(message)
