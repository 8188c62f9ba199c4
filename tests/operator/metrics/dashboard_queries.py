"""The dashboards in the chart, and their queries with values for what a person chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "helm/rljob/files/dashboards"


def dashboards() -> dict[str, dict[str, Any]]:
    """Return each dashboard by the name of its file."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def dashboard_queries(namespace: str, job: str, window: str = "15m") -> dict[str, str]:
    """Return each query by the panel that shows it."""
    chosen = {"$namespace": namespace, "$rljob": job, "$window": window, "$target": "5"}
    found = {}
    for name, board in dashboards().items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                query = target["expr"]
                for variable, value in chosen.items():
                    query = query.replace(variable, value)
                found[f"{name}: {panel['title']} {target['refId']}"] = query
    return found
