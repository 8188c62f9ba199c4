"""Fetching from the Hugging Face and ModelScope hubs, through their own client libraries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljob_api.spec import Hub
from rljob_worker.errors import UserError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id: `name` or `owner/name`."""
    return _HUB_ID.fullmatch(name) is not None


def snapshot(
    name: str, hub: Hub, field: str, *, revision: str | None = None, patterns: Sequence[str] | None = None
) -> Path:
    """Local folder with the files of a model repository (those that match `patterns`, default all).

    Raises UserError, naming the manifest's `field` (such as `spec.model`), when the repository cannot be fetched or
    the hub's client is not installed.
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
        raise UserError(hub_failure(name, hub, field, error)) from error


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


def hub_failure(name: str, hub: Hub, field: str, error: Exception) -> str:
    """One message for whatever a hub's client raised."""
    reason = str(error).strip().splitlines() or [""]
    return (
        f"{field}.path: {name!r} is not a local path, and fetching it from {hub.value} failed: "
        f"{type(error).__name__}: {reason[0]}"
    )
