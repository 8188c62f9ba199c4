"""Text for a terminal: widths, colours, times, columns."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rljob_api.safe_text import visible, visible_line

_NARROWEST = 40


@dataclass(frozen=True, slots=True)
class Style:
    """Capabilities of the terminal."""

    width: int = 80
    colour: bool = False
    unicode: bool = True

    @classmethod
    def of(cls, stream: TextIO, environment: Mapping[str, str] = os.environ) -> Style:
        """Colour on a terminal alone and not where NO_COLOR is set; the width is COLUMNS or the terminal's, else 80."""
        terminal = stream.isatty() and environment.get("TERM") != "dumb"
        encoding = (stream.encoding or "ascii").lower().replace("-", "")
        return cls(
            width=max(shutil.get_terminal_size((80, 24)).columns, _NARROWEST),
            colour=terminal and not environment.get("NO_COLOR"),
            unicode=encoding.startswith("utf"),
        )

    def paint(self, text: str, colour: int | None, bold: bool = False) -> str:
        """Text in a colour of the 256-colour palette, where there are colours."""
        if not self.colour or not text or (colour is None and not bold):
            return text
        codes = ["1"] * bold + ([f"38;5;{colour}"] if colour is not None else [])
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m"


def wrapped(text: str, style: Style, indent: str = "") -> list[str]:
    """Text in lines that fit, each with the indent; words that are too long stay whole, so that they can be copied."""
    return textwrap.wrap(
        visible(" ".join(text.split())),
        width=style.width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def columns(rows: Sequence[Sequence[str]], style: Style, indent: str = "  ") -> list[str]:
    """Rows with aligned columns; the last column is wrapped into the rest of the line."""
    if not rows:
        return []
    rows = [[*map(visible_line, row[:-1]), row[-1]] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        start = indent + "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths))
        rest = wrapped(row[-1], style, " " * min(len(start), style.width // 2)) or [""]
        lines.append((start + rest[0].lstrip()).rstrip())
        lines += rest[1:]
    return lines


def seconds(value: float) -> str:
    """Return `12 ms`, `0.31 s`, `31.2 s`, `312 s`, or `-` for none at all; for comparing, so never minutes."""
    if not value:
        return "-"
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s" if value < 99.95 else f"{value:.0f} s"


def number(value: float | None) -> str:
    """Three significant digits, or `-` where nothing was measured."""
    return "-" if value is None else f"{value:.3g}"
