"""A tracker: the one interface behind which W&B, MLflow, ClearML, SwanLab and Trackio stand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

Row = Mapping[str, str | float | int | None]


@dataclass(frozen=True, slots=True)
class Opening:
    """Data with which a tracker opens its run."""

    project: str
    run: str
    """Name of the run, for people."""
    folder: str
    """Folder on this machine that its package may write to."""
    id: str | None = None
    """Id of the run that an earlier attempt opened; None: there is none."""
    workspace: str | None = None
    url: str | None = None
    offline: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    """The job, nested."""

    def to_line(self) -> str:
        """Line that the tracker's process reads."""
        return json.dumps(asdict(self))

    @classmethod
    def of_line(cls, line: str) -> Opening:
        """Opening from `to_line`."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Opened:
    """The run that a tracker opened."""

    id: str
    """With which a later attempt opens the same one."""
    place: str
    """Place for people to look at it: an address, or a folder."""


class Tracker(Protocol):
    """An open run. What a package raises is caught, counted and named by the caller."""

    opened: Opened

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Values by metric at a step; `time` in Unix seconds. A step that was run again comes again."""

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """A table of samples at a step; all rows have the same columns."""

    def finish(self, failed: bool) -> None:
        """Deliver what is left and close the run."""


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping by dotted names; lists stay as they are."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        inner = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found


def columns(rows: Sequence[Row]) -> list[str]:
    """Names of a table's columns."""
    return list(rows[0]) if rows else []
