"""HTML pages of runs and evaluations: one file that loads nothing, whose texts are shown and never obeyed."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import jinja2
from markupsafe import Markup

from rljob_api.json_types import JsonObject
from rljob_api.safe_text import visible
from rljob_worker.report.text import excerpt, number

_ASSETS = resources.files("rljob_worker.report") / "assets"
_SCRIPTS = ("uplot/uPlot.iife.min.js", "charts.js", "samples.js")
_STYLES = ("uplot/uPlot.min.css", "report.css")
_NO_LIMIT = 1000
_PNG, _BASE64 = "iVBORw0KGgo", re.compile("[A-Za-z0-9+/]+={0,2}", re.ASCII)
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Heading:
    """The title of a section."""

    text: str
    kind: ClassVar[str] = "heading"


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A sentence or some."""

    text: str
    kind: ClassVar[str] = "paragraph"


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG image, kept within the page."""

    base64: str
    alt: str
    fallback: bool = False
    """Shown only where scripts do not run."""
    kind: ClassVar[str] = "picture"


@dataclass(frozen=True, slots=True)
class Place:
    """An empty section that a script fills."""

    name: str
    kind: ClassVar[str] = "place"


@dataclass(frozen=True, slots=True)
class FileLink:
    """A file beside the page, to be downloaded."""

    file: str
    text: str
    """Behind the link."""
    name: str = ""
    """Under which the scripts find it."""
    kind: ClassVar[str] = "link"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of plain texts."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    name: str = ""
    """Under which the scripts find it."""
    text_from: int = _NO_LIMIT
    """First column of texts that the policy or a user wrote: they keep their line breaks."""
    pictures: Sequence[Sequence[str]] = ()
    """PNG images of each row, in base64, before the text of that column; empty: no row has any."""
    kind: ClassVar[str] = "table"


Part = Heading | Paragraph | Picture | Place | FileLink | Table


def picture(png: Path, alt: str, *, fallback: bool = False) -> Picture:
    """The picture in a file."""
    return Picture(base64.b64encode(png.read_bytes()).decode(), alt, fallback)


def sample_table(samples: Sequence[dict[str, Any]]) -> Table:
    """The worst and the best of some rows of a trajectory file, by their rewards."""
    ordered = sorted((s for s in samples if s["reward"] is not None), key=lambda sample: float(sample["reward"]))
    chosen = [*ordered[:_EXAMPLES], *ordered[-_EXAMPLES:]] if len(ordered) > 2 * _EXAMPLES else ordered
    texts = [[sample["prompt"], sample["response"], str(sample["label"])] for sample in chosen]
    rows = [[number(sample["reward"]), *map(excerpt, row)] for sample, row in zip(chosen, texts, strict=True)]
    seen = [[str(picture["thumbnail"]) for picture in sample.get("pictures", [])] for sample in chosen]
    return Table(
        ["reward", "prompt", "response", "label"],
        rows,
        text_from=1,
        pictures=[*map(_images, seen)] if any(seen) else (),
    )


def _images(pictures: Sequence[str]) -> list[str]:
    """Keep what is base64 of PNG, and nothing else that a file could hold."""
    return [picture for picture in pictures if picture.startswith(_PNG) and _BASE64.fullmatch(picture)]


def document(name: str, parts: Iterable[Part], manifest: JsonObject, data: JsonObject | None = None) -> str:
    """A whole page.

    Args:
        name: its title.
        parts: of its body, in order.
        manifest: of the job, which ends the page.
        data: of the scripts (`page_data`); None: the page has none.
    """
    scripts = [_asset(file) for file in _SCRIPTS] if data is not None else []
    style = "\n".join(_asset(file) for file in _STYLES)
    return _template().render(
        name=name,
        parts=list(parts),
        manifest=json.dumps(manifest, indent=1, ensure_ascii=False),
        data=None if data is None else Markup(script_json(data)),
        scripts=[Markup(script) for script in scripts],
        style=Markup(style),
        policy=_policy(scripts, style, live=data is not None and bool(data.get("live"))),
    )


def script_json(content: JsonObject) -> str:
    """JSON in ASCII that can stand within a script element: no text in it ends the element or begins a comment."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c")


def _policy(scripts: Sequence[str], style: str, *, live: bool) -> str:
    """The Content-Security-Policy: these scripts and styles by their digests, and nothing from outside."""
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(map(_digest, scripts)) or "'none'",
        "style-src": _digest(style),
        "img-src": "data:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _asset(name: str) -> str:
    return _ASSETS.joinpath(name).read_text("utf-8")


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, finalize=_shown, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_asset("page.html.j2"))


def _shown(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
