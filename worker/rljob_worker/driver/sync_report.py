"""The `weights` block of a step record, from what trainers and engines reported. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rljob_api import metrics as m
from rljob_api.wire.step_record import WeightSync
from rljob_worker.errors import WeightSyncError
from rljob_worker.types import EngineReport, TrainerReport


def sync_report(
    version: int, sent: Sequence[TrainerReport], received: Sequence[EngineReport], nodes: int = 1
) -> WeightSync:
    """One block for all processes: bytes of the model and of a node's slots, seconds of the slowest process.

    Each of the `nodes` hands the whole model over, to its own engines.

    Raises:
        WeightSyncError: an engine says that it holds another version, or did not verify this one.
    """
    for number, r in enumerate(received):
        if not r["verified"] or r["version"] != version:
            found = f"version {r['version']}, {'verified' if r['verified'] else 'not verified'}"
            raise WeightSyncError(f"engine {number} reports {found}, after version {version} was handed over")
    return WeightSync(
        version=version,
        bytes=sum(r["bytes"] for r in sent) // nodes,
        staging_bytes=sum(r["staging_bytes"] for r in sent) // nodes,
        tensors=received[0]["tensors"],
        verified=True,
        mode=received[0]["mode"],
        send=_slowest(sent),
        receive=_slowest(received),
    )


def lost_in_rounding(sent: Sequence[TrainerReport]) -> dict[str, float]:
    """The share of what adapters change that the merged weights' format lost; nothing where they change nothing."""
    change = sum(report.get("lora_change", 0.0) for report in sent)
    return {m.LORA_LOST_KEY: sum(report.get("lora_lost", 0.0) for report in sent) / change} if change > 0 else {}


def _slowest(reports: Sequence[Mapping[str, object]]) -> dict[str, float]:
    names = dict.fromkeys(name for r in reports for name in r if name.endswith("_seconds") or name == "seconds")
    return {name: max(_seconds(report.get(name, 0.0)) for report in reports) for name in names}


def _seconds(value: object) -> float:
    assert isinstance(value, int | float)
    return value
