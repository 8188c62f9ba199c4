"""The kept part of an RLJob, whose size is bounded so that thousands fit into the operator's memory."""

from __future__ import annotations

import zlib
from typing import cast

from pydantic_core import from_json, to_json

from rljob_api.queue_label import QUEUE_LABEL
from rljob_operator.kubernetes_objects import RLJobObject
from rljob_operator.render import MAX_MANIFEST_BYTES
from rljob_operator.state.checkpoints import ANNOTATION
from rljob_operator.state.status_text import short_value

_PACKED_FROM = 4096
"""Smaller texts are as quick to read as they are small."""
_MOST_SPEC_BYTES = MAX_MANIFEST_BYTES
"""Largest size of a packed spec. A driver's manifest holds it, and in base64; one that is larger cannot be rendered."""
_MOST_LABELS = 64
_META = ("namespace", "name", "uid", "generation", "creationTimestamp", "deletionTimestamp")


class TooLarge(ValueError):
    """The spec was not kept; the message says why, and what would help."""


def job_text(item: RLJobObject) -> bytes:
    """JSON text of what is read of an RLJob, packed where it is long: a tenth of the memory of the parsed object."""
    meta = {name: value for name, value in item["metadata"].items() if name in _META}
    wish = (item["metadata"].get("annotations") or {}).get(ANNOTATION)
    annotations = {} if wish is None else {ANNOTATION: short_value(wish)}
    parts = {
        "metadata": {**meta, "annotations": annotations, "labels": _kept_labels(item)},
        "spec": item.get("spec"),
        "status": item.get("status"),
    }
    text = to_json(parts)
    if len(text) > _MOST_SPEC_BYTES and (size := len(zlib.compress(to_json(parts["spec"])))) > _MOST_SPEC_BYTES:
        text = to_json({**parts, "spec": None, "specBytes": size})
    return zlib.compress(text, level=1) if len(text) >= _PACKED_FROM else text


def _kept_labels(item: RLJobObject) -> dict[str, str]:
    """Labels that may mean something: that of the queue, and of the others first those without a prefix."""
    labels = item["metadata"].get("labels") or {}
    ordered = sorted(labels, key=lambda key: (key != QUEUE_LABEL, "/" in key, key))
    return {key: labels[key] for key in ordered[:_MOST_LABELS]}


def kept_job(kept: bytes) -> RLJobObject:
    """The reverse of `job_text`."""
    # JSON text of an object begins with a brace, what zlib packs never does.
    return cast("RLJobObject", from_json(kept if kept.startswith(b"{") else zlib.decompress(kept)))


def check_kept(item: RLJobObject) -> None:
    """Refuse a job whose spec was too large to be kept.

    Raises:
        TooLarge: it was.
    """
    size = item.get("specBytes")
    if size:
        raise TooLarge(
            f"spec: has {size} bytes when packed, and {MAX_MANIFEST_BYTES} of the manifest fit into a driver's "
            "environment; put long texts into files of a volume"
        )
