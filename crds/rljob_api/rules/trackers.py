"""Rules about experiment trackers."""

from __future__ import annotations

from typing import Any

from rljob_api.rules.core import Rule
from rljob_api.spec import (
    RecordsSpec,
    RLJobSpec,
    TrackerSpec,
)

TRACKER_KEYS = {
    "wandb": ("WANDB_API_KEY",),
    "mlflow": ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    "clearml": ("CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY"),
    "swanlab": ("SWANLAB_API_KEY",),
    "trackio": ("HF_TOKEN", "TRACKIO_WRITE_TOKEN"),
}
"""Variables with which a tracker's package logs in."""


def _without_keys(spec: Any) -> bool:
    keys = {key for tracker in spec.records.trackers for key in TRACKER_KEYS[tracker.name]}
    return keys.isdisjoint(spec.environment.variables)


TRACKERS = (
    Rule(
        on=RecordsSpec,
        field="trackers",
        wrong="a tracker is named twice",
        allowed="each name at most once",
        check=lambda r: len({t.name for t in r.trackers}) == len(r.trackers),
        cel="self.trackers.all(a, self.trackers.exists_one(b, b.name == a.name))",
    ),
    Rule(
        on=TrackerSpec,
        field="workspace",
        wrong="this tracker has none",
        allowed="only with wandb and swanlab",
        check=lambda t: t.workspace is None or t.name in ("wandb", "swanlab"),
        cel="!has(self.workspace) || self.name in ['wandb', 'swanlab']",
    ),
    Rule(
        on=TrackerSpec,
        field="url",
        wrong="is not used offline",
        allowed="leave it out, or offline: false",
        check=lambda t: t.url is None or not t.offline,
        cel="!has(self.url) || !has(self.offline) || !self.offline",
    ),
    Rule(
        on=RLJobSpec,
        # Not the variables: a message shows the value of what it blames.
        field="records.trackers",
        wrong="environment.variables has the key of one, where everyone who may read the job sees it",
        allowed="keys in a Secret of environment.secrets",
        check=_without_keys,
        cel=None,
    ),
)
