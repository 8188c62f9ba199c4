"""Draw docs/images/dashboard-*.png: `python docs/images/dashboards.py RUN`, from the folder of a run, in two minutes.

Each panel of the chart's dashboards with the data that its own queries return from a real Prometheus, which scrapes a
whole operator. The operator reads the step records of the run as it would from the job's driver: in their order and at
their distances, so much faster that they take a minute. The API server and Ray's API are those of the operator's tests;
Grafana is not run. A panel without data says why, and one that has none without a reason ends the program.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import matplotlib as mpl
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / part) for part in ("", "operator/shell", "operator/metrics")]

from dashboard_queries import dashboards  # noqa: E402
from operator_cases import a_case  # noqa: E402
from real_records import real_records, record_after  # noqa: E402
from test_dashboards import prometheus, to_running  # noqa: E402

from rljob_api.looks import PHASE_COLORS  # noqa: E402
from rljob_operator.state.reconcile import reconcile  # noqa: E402

SECONDS = 75.0
EMPTY = {
    "rljob:phase_seconds:": "its recorded series look six hours back",
    "rljob_lane_phase_seconds": "trainers and engines take turns: there are no lanes",
    "env_wait": "the job has no environment",
    "rljob_environment_failures": "the job has no environment",
    "rljob_restarts_total": "nothing was restarted",
    "rljob_engine_nodes": "the number of nodes is fixed",
}
"""Part of a query -> why it may return nothing."""
CHOSEN = {"$namespace": "default", "$rljob": "a", "$window": "30s", "$target": "5"}
Series = list[dict[str, Any]]


async def data(run: Path) -> dict[str, list[list[Series]]]:
    """Return, for each dashboard, what the queries of each panel return over the whole time.

    Args:
        run: folder of the run.
    """
    records = real_records(run)
    steps = json.loads((run / "run.json").read_text())["job"]["spec"]["steps"]
    first, last = records[0]["time"], records[-1]["time"]
    speed = max(1.0, (last - first) / SECONDS)
    async with a_case() as case, case.operator(reconcile) as controller, aiohttp.ClientSession() as session:
        await to_running(case, steps=steps)
        with tempfile.TemporaryDirectory() as folder:
            async with prometheus(Path(folder), controller.port) as address:
                began = time.time()
                for record in records:
                    await asyncio.sleep(began + (record["time"] - first) / speed - time.time())
                    case.job.records.append(record_after(case.job.records, record))
                    controller.queue.add(next(controller.informers.jobs.jobs()))
                asked = {"start": began, "end": time.time(), "step": 1}
                return {
                    name: [
                        [await _range(session, address, target["expr"], asked) for target in panel["targets"]]
                        for panel in board["panels"]
                    ]
                    for name, board in dashboards().items()
                }


async def _range(session: aiohttp.ClientSession, address: str, query: str, asked: dict[str, float]) -> Series:
    for variable, value in CHOSEN.items():
        query = query.replace(variable, value)
    async with session.get(f"{address}/api/v1/query_range", params={"query": query, **asked}) as response:
        answer = await response.json()
    assert answer["status"] == "success", f"{query}: {answer}"
    found: Series = answer["data"]["result"]
    return found


def draw(board: dict[str, Any], found: list[list[Series]], path: Path) -> None:
    """Draw a dashboard: each panel in its place, graphs as lines, all others as the newest values."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    figure = plt.figure(figsize=(12, rows * 0.3))
    grid = figure.add_gridspec(
        rows, 24, left=0.05, right=0.98, top=1 - 0.7 / rows, bottom=0.8 / rows, wspace=4, hspace=6
    )
    for panel, answers in zip(board["panels"], found):
        place = panel["gridPos"]
        axes = figure.add_subplot(grid[place["y"] : place["y"] + place["h"] - 1, place["x"] : place["x"] + place["w"]])
        unit = panel["fieldConfig"]["defaults"]["unit"]
        axes.set_title(panel["title"] + ("" if unit == "short" else f" ({unit})"), fontsize=8, loc="left")
        series = [
            (legend(target, one), one["values"]) for target, many in zip(panel["targets"], answers) for one in many
        ]
        why = reason(panel, series)
        if panel["type"] == "timeseries":
            _lines(axes, series, "stacking" in panel["fieldConfig"]["defaults"].get("custom", {}), why)
        else:
            _values(axes, series, (panel["options"] or {}).get("textMode") == "name", why)
    figure.savefig(path, dpi=80, metadata={"Software": None})
    plt.close(figure)


def legend(target: dict[str, Any], series: dict[str, Any]) -> str:
    """The name of a series as the panel words it."""
    text = target.get("legendFormat") or " ".join(f"{{{{{name}}}}}" for name in series["metric"])
    for name, value in series["metric"].items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def reason(panel: dict[str, Any], series: Sequence[object]) -> str:
    """Why a panel may be empty; AssertionError where it is, and nothing says why."""
    asked = " ".join(target["expr"] for target in panel["targets"])
    found = next((why for part, why in EMPTY.items() if part in asked), "")
    assert series or found, f"{panel['title']}: no data, and no reason for it in EMPTY: {asked}"
    return found


def _lines(axes: Any, series: list[tuple[str, list[list[Any]]]], stacked: bool, why: str) -> None:
    axes.tick_params(labelsize=6)
    axes.set_xticks([])
    if not series:
        axes.text(
            0.5, 0.5, f"no data: {why}", ha="center", va="center", transform=axes.transAxes, fontsize=7, color="gray"
        )
        return
    at = sorted({moment for _, values in series for moment, _ in values})
    lines = []
    for _, values in series:
        known = {moment: float(value) for moment, value in values}
        lines.append([known.get(moment, 0.0 if stacked else float("nan")) for moment in at])
    names = [name for name, _ in series]
    # Phases as in all other pictures; the rest in the order of matplotlib.
    colors = [PHASE_COLORS.get(name, f"C{number % 10}") for number, name in enumerate(names)]
    if stacked:
        axes.stackplot(at, lines, labels=names, colors=colors)
    else:
        for name, line, color in zip(names, lines, colors):
            axes.plot(at, line, label=name, linewidth=1, color=color)
    axes.legend(fontsize=5, loc="center left", ncols=1 + len(names) // 9)


def _values(axes: Any, series: list[tuple[str, list[list[Any]]]], name_alone: bool, why: str) -> None:
    axes.axis("off")
    shown = [name if name_alone else f"{name}  {float(values[-1][1]):.4g}" for name, values in series]
    axes.text(0.0, 0.5, "\n".join(shown) or f"no data: {why}", va="center", transform=axes.transAxes, fontsize=10)


if __name__ == "__main__":
    mpl.use("Agg")
    drawn = asyncio.run(data(Path(sys.argv[1])))
    for name, board in dashboards().items():
        draw(board, drawn[name], Path(__file__).parent / f"dashboard-{name.removeprefix('rljob-')}.png")
