"""`report.html` and `report.png` of a run folder."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from typing import Any

from rljob_worker.errors import UserError
from rljob_worker.records.run_files import require_run_folder
from rljob_worker.records.steps import effective_steps, read_steps
from rljob_worker.records.summary import phase_table
from rljob_worker.records.trajectories import FOLDER, read_trajectories
from rljob_worker.report.plot import plot_run

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } img { max-width: 100% }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
td.text { text-align: left; font-family: monospace; white-space: pre-wrap }
"""
_EXAMPLES = 5


def build_report(run_folder: Path) -> tuple[Path, Path]:
    """Write the report from the run's records; returns the HTML and the PNG file.

    Raises:
        UserError: the run has no step record yet.
    """
    records = read_steps(run_folder)
    if not records:
        raise UserError(f"{run_folder}: no step was finished yet, there is nothing to report")
    run = require_run_folder(run_folder)
    kept = effective_steps(records)
    name = run["job"]["metadata"]["name"]
    png = plot_run(
        kept, f"{name}: {kept[-1]['step']} of {run['job']['spec']['steps']} steps", run_folder / "report.png"
    )
    page = run_folder / "report.html"
    page.write_text(_page(name, run, records, kept, png, run_folder))
    return page, png


def _page(
    name: str, run: dict[str, Any], records: list[dict[str, Any]], kept: list[dict[str, Any]], png: Path, folder: Path
) -> str:
    image = base64.b64encode(png.read_bytes()).decode()
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{html.escape(name)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(name)}</h1>",
        _facts(run, records, kept),
        f'<img alt="reward, phase seconds and log-probability difference" src="data:image/png;base64,{image}">',
        "<h2>Phases</h2>",
        _phases(kept),
        _examples(folder),
        "<h2>Manifest</h2>",
        f"<pre>{html.escape(json.dumps(run['job'], indent=1))}</pre></html>",
    ]
    return "\n".join(parts)


def _facts(run: dict[str, Any], records: list[dict[str, Any]], kept: list[dict[str, Any]]) -> str:
    first, last = kept[0]["metrics"], kept[-1]["metrics"]
    lost = len(records) - len(kept)
    facts = {
        "steps": f"{kept[-1]['step']} of {run['job']['spec']['steps']}",
        "attempts": str(run["attempt"]),
        "steps run again after a restart": str(lost),
        "mean reward, first and last step": f"{first['rollout/raw_reward']:.3f}, {last['rollout/raw_reward']:.3f}",
        "weights verified": f"{sum(bool(r['weights'].get('verified')) for r in records)} of {len(records)} syncs",
    }
    rows = "".join(f"<tr><td>{html.escape(k)}<td>{html.escape(v)}" for k, v in facts.items())
    return f"<table>{rows}</table>"


def _phases(kept: list[dict[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{row['phase']}<td>{row['median'] * 1000:.1f}<td>{row['p95'] * 1000:.1f}<td>{row['total']:.2f}"
        f"<td>{row['share'] * 100:.1f} %<td>{row['steps']}"
        for row in phase_table(kept)
    )
    head = "<tr><th>phase<th>median ms<th>p95 ms<th>total s<th>share<th>steps"
    return f"<table>{head}{rows}</table>"


def _examples(folder: Path) -> str:
    if not any((folder / FOLDER).glob("*.gz")):
        return ""
    step, samples = read_trajectories(folder)
    ordered = sorted(samples, key=lambda sample: float(sample["reward"]))
    chosen = [*ordered[:_EXAMPLES], *ordered[-_EXAMPLES:]] if len(ordered) > 2 * _EXAMPLES else ordered
    rows = "".join(
        f"<tr><td>{sample['reward']:.3f}<td class=text>{html.escape(sample['prompt'])}"
        f"<td class=text>{html.escape(sample['response'])}<td class=text>{html.escape(str(sample['label']))}"
        for sample in chosen
    )
    head = "<tr><th>reward<th>prompt<th>response<th>label"
    return f"<h2>Worst and best samples of step {step}</h2><table>{head}{rows}</table>"
