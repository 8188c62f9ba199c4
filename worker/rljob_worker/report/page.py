"""Parts of the HTML pages: all text in them is shown, none obeyed."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from rljob_api.json_types import JsonObject
from rljob_api.safe_text import visible
from rljob_worker.report.text import number

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } img { max-width: 100% }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left } td { vertical-align: top }
td.text { text-align: left; font-family: monospace; white-space: pre-wrap; overflow-wrap: anywhere }
"""
_EXAMPLES = 5


def document(name: str, parts: Iterable[str], manifest: JsonObject) -> str:
    """A whole page.

    Args:
        name: its title.
        parts: of its body, as HTML.
        manifest: of the job, which ends the page.
    """
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">',
            f'<head><meta charset="utf-8"/><title>{html.escape(name)}</title><style>{_STYLE}</style></head>',
            f"<body><h1>{html.escape(name)}</h1>",
            *parts,
            "<h2>Manifest</h2>",
            f"<pre>{html.escape(visible(json.dumps(manifest, indent=1, ensure_ascii=False)))}</pre>",
            "</body></html>\n",
        ]
    )


def heading(text: str) -> str:
    """A heading of plain text."""
    return f"<h2>{html.escape(visible(text))}</h2>"


def sample_table(samples: Sequence[dict[str, Any]]) -> str:
    """The worst and the best of some rows of a trajectory file, by their rewards."""
    ordered = sorted((s for s in samples if s["reward"] is not None), key=lambda sample: float(sample["reward"]))
    chosen = [*ordered[:_EXAMPLES], *ordered[-_EXAMPLES:]] if len(ordered) > 2 * _EXAMPLES else ordered
    rows = [[number(sample["reward"]), sample["prompt"], sample["response"], str(sample["label"])] for sample in chosen]
    return table(["reward", "prompt", "response", "label"], rows, text_from=1)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], text_from: int = 1000) -> str:
    """An HTML table of plain texts; columns from `text_from` on hold what the policy or a user wrote."""
    lines = ["<table>"]
    if head:
        lines.append("<tr>" + "".join(f"<th>{html.escape(visible(cell))}</th>" for cell in head) + "</tr>")
    for row in rows:
        opening = ['<td class="text">' if column >= text_from else "<td>" for column in range(len(row))]
        cells = (f"{tag}{html.escape(visible(cell))}</td>" for tag, cell in zip(opening, row, strict=True))
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "\n".join([*lines, "</table>"])
