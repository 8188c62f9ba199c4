"""The `weights` block of a step record, from what senders and receivers reported. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def sync_report(
    version: int, sent: Sequence[Mapping[str, Any]], received: Sequence[Mapping[str, Any]], nodes: int = 1
) -> dict[str, Any]:
    """One block for all processes: bytes are those of the model once, seconds those of the slowest process.

    Each of the `nodes` hands the whole model over, to its own engines.
    """
    report: dict[str, Any] = {
        "version": version,
        "bytes": sum(r["bytes"] for r in sent) // nodes,
        "tensors": received[0]["tensors"],
        "verified": all(r["verified"] and r["version"] == version for r in received),
        "mode": received[0]["mode"],
    }
    for side, reports in (("send", sent), ("receive", received)):
        names = dict.fromkeys(name for r in reports for name in r if name.endswith("_seconds") or name == "seconds")
        report[side] = {name: max(r.get(name, 0.0) for r in reports) for name in names}
    return report
