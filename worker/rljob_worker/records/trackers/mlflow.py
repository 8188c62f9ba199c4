"""MLflow, through the client that `mlflow-skinny` has."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from rljob_worker.records.trackers.tracker import Opened, Opening, Row, columns, flat

_AT_ONCE = {"params": 100, "metrics": 1000}
"""Bounds of MLflow's `log-batch` (docs: REST API, Log Batch)."""
_PARAM_CHARACTERS = 6000


class MlflowTracker:
    """A run on a tracking server, or in a file store when offline."""

    def __init__(self, opening: Opening) -> None:
        # The package's own: seven tries of two minutes each, for every call.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        uri = opening.url
        if opening.offline:
            # mlflow-skinny has no database; the file store is what it keeps without a server.
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
            uri = Path(opening.folder).absolute().as_uri()
        self._client = MlflowClient(uri)
        self._id = opening.id or self._new_run(opening)
        known = self._client.get_run(self._id).data.params
        self._client.update_run(self._id, status="RUNNING")
        self._params({name: text for name, text in _texts(opening.config).items() if name not in known})
        self.opened = Opened(self._id, uri or str(self._client.tracking_uri))

    def _new_run(self, opening: Opening) -> str:
        experiment = self._client.get_experiment_by_name(opening.project)
        made = self._client.create_experiment(opening.project) if experiment is None else experiment.experiment_id
        return str(self._client.create_run(made, run_name=opening.run).info.run_id)

    def _params(self, texts: Mapping[str, str]) -> None:
        params = [Param(name, text) for name, text in texts.items()]
        for first in range(0, len(params), _AT_ONCE["params"]):
            self._client.log_batch(self._id, params=params[first : first + _AT_ONCE["params"]])

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Same as `Tracker`."""
        metrics = [Metric(name, value, int(time * 1000), step) for name, value in values.items()]
        for first in range(0, len(metrics), _AT_ONCE["metrics"]):
            self._client.log_batch(self._id, metrics=metrics[first : first + _AT_ONCE["metrics"]])

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Same as `Tracker`; in the form of pandas' `split`, which MLflow shows as a table."""
        table = {"columns": columns(rows), "data": [list(row.values()) for row in rows]}
        self._client.log_text(self._id, json.dumps(table), f"samples/step-{step:06d}.json")

    def finish(self, failed: bool) -> None:
        """Same as `Tracker`."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _texts(config: Mapping[str, Any]) -> dict[str, str]:
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in flat(config).items()}
    return {name: text[:_PARAM_CHARACTERS] for name, text in values.items()}


open_tracker = MlflowTracker
