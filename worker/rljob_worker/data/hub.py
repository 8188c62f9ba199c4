"""Fetching from the Hugging Face and ModelScope hubs, through their own client libraries."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rljob_api.spec import Hub
from rljob_worker.data import hub_answers
from rljob_worker.errors import JobError, UserError, no_folder
from rljob_worker.host.paths import home_expanded
from rljob_worker.models.places import folder_here
from rljob_worker.waiting import waiting_for

logger = logging.getLogger(__name__)

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
_BUSY = {408, 429}
"""HTTP: too slow, too many requests."""


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id: `name` or `owner/name`."""
    return _HUB_ID.fullmatch(name) is not None


MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Files of a model repository that a model beside the policy is read from."""


def folder_beside(path: str, hub: Hub, field: str) -> Path:
    """Local folder of a model beside the policy (a critic's start, a teacher), which a path or a hub id names.

    Raises UserError, naming the manifest's `field` with the path, and JobError as `snapshot` does.
    """
    local = folder_here(path, field)
    if local is not None:
        return local
    if path.startswith(("/", "~", ".")):
        raise UserError(f"{field}: {no_folder(home_expanded(path))}")
    return snapshot(path, hub, field, patterns=MODEL_FILES)


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
        check_hub(name, hub, "models", field)
    except JobError as error:
        with suppress(Exception):
            folder = Path(download(name, local_files_only=True, **arguments))
            logger.warning("%s; what was fetched before is used: %s", error, folder)
            return folder
        raise
    try:
        with hub_answers.with_deadlines(), waiting_for(f"files of {field}.path {name} from {hub.value}"):
            return Path(download(name, **arguments))
    except Exception as error:
        raise hub_failure(name, hub, field, error) from error


def check_hub(name: str, hub: Hub, kind: hub_answers.Kind, field: str) -> None:
    """Refuse a hub that does not answer: JobError, naming the manifest's `field`."""
    hub_answers.check_answers(hub, name, kind, f"{field}.path: {name!r} is not a local path, and fetching it failed")


def check_push(repository: str) -> None:
    """Refuse what cannot be pushed before anything is exported.

    Raises:
        UserError: the name is not one of a repository, or there is no token.
    """
    from huggingface_hub import get_token

    if not is_hub_id(repository) or "/" not in repository:
        raise UserError(f"--push-to: {repository!r} is not the id of a repository: ORG/NAME")
    if get_token() is None:
        raise UserError("--push-to: there is no token; set HF_TOKEN to one that may write")


def push_folder(folder: Path, repository: str, message: str, *, private: bool) -> str:
    """Upload a folder as one commit to a model repository of the Hugging Face hub; returns the repository's address.

    Args:
        folder: what to upload.
        repository: `ORG/NAME`; made where there is none.
        message: of the commit.
        private: for a repository that is made; one that is there stays as visible as it is.

    Raises:
        UserError: the hub refuses it.
        JobError: the hub cannot be reached. `folder` stays in both cases.
    """
    from huggingface_hub import HfApi

    wrong = f"--push-to: {folder} is exported, but pushing it failed"
    hub_answers.check_answers(Hub.HUGGING_FACE, repository, "models", wrong)
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        made = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except Exception as error:
        wrong = f"--push-to: {folder} is exported, but pushing it to {repository} failed: {_reason(error)}"
        status = getattr(getattr(error, "response", None), "status_code", None)
        answered_no = status is not None and 400 <= status < 500 and status not in _BUSY
        raise JobError(wrong) if _passes(error) and not answered_no else UserError(wrong) from error
    return str(made)


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
    wrong = f"{field}.path: {name!r} is not a local path, and fetching it from {hub.value} failed: {_reason(error)}"
    return JobError(f"{wrong}; the hub is {hub_answers.place_of(hub)}") if _passes(error) else UserError(wrong)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _passes(error: Exception) -> bool:
    """Whether the hub may answer another time."""
    refused = any(kind.__name__ in _REFUSALS for kind in type(error).__mro__)
    # The Hugging Face clients let what httpx raises in the middle of a download through, which is no OSError.
    passes = isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("httpx", "httpcore")
    return passes and not refused
