"""Text for a terminal: widths, colours, times, columns; rich draws it, as it does for `rljob`."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO, cast

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style as Look
from rich.table import Table
from rich.text import Text

from rljob_api.looks import HEADING
from rljob_api.safe_text import visible, visible_line

_NARROWEST = 40
Palette = Literal["standard", "256", "truecolor", "windows"]
"""Colours that a terminal has, as rich names them."""
_SYSTEMS = {
    "standard": ColorSystem.STANDARD,
    "256": ColorSystem.EIGHT_BIT,
    "truecolor": ColorSystem.TRUECOLOR,
    "windows": ColorSystem.WINDOWS,
}


@dataclass(frozen=True, slots=True)
class Style:
    """Capabilities of the terminal."""

    width: int = 80
    colours: Palette | None = None
    """None: no colours."""
    unicode: bool = True

    @classmethod
    def of(cls, stream: TextIO, environment: Mapping[str, str] = os.environ) -> Style:
        """Colours on a terminal alone, and not where NO_COLOR is set; width of COLUMNS or of the terminal, else 80."""
        console = Console(file=stream, _environ=environment)
        encoding = (stream.encoding or "ascii").lower().replace("-", "")
        plain = not stream.isatty() or console.no_color or console.is_dumb_terminal
        return cls(
            width=max(console.width, _NARROWEST),
            colours=None if plain else cast(Palette | None, console.color_system),
            unicode=encoding.startswith("utf"),
        )

    @property
    def colour(self) -> bool:
        """Whether there are colours."""
        return self.colours is not None

    def paint(self, text: str, look: str) -> str:
        """Text in a style of rich's, as near as the terminal comes to it; as it is where there are no colours."""
        if self.colours is None or not text:
            return text
        return Look.parse(look).render(text, color_system=_SYSTEMS[self.colours])


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


def columns(
    rows: Sequence[Sequence[str]],
    style: Style,
    indent: str = "  ",
    *,
    heading: bool = False,
    looks: Mapping[str, str] | None = None,
) -> list[str]:
    """Rows with aligned columns; the last column is wrapped into the rest of the line.

    Args:
        rows: texts from outside too: what a terminal would obey is shown.
        style: the terminal.
        indent: before each line.
        heading: whether the first row is one.
        looks: text of a cell, but for the last -> its style.
    """
    if not rows:
        return []
    looks = looks or {}
    shown = [list(map(visible_line, row[:-1])) for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*shown, strict=True)]
    start = len(indent) + sum(width + 2 for width in widths)
    room = Style(width=max(style.width - start, style.width // 4))
    last = [wrapped(row[-1], room) for row in rows]
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for _ in rows[0]:
        table.add_column(no_wrap=True)
    for number, (cells, lines) in enumerate(zip(shown, last, strict=True)):
        look = HEADING if heading and not number else ""
        # Appended, for the padding of a text that has a style has it too.
        named = [Text().append(cell, look or looks.get(cell, "")) for cell in cells]
        table.add_row(*named, Text().append("\n".join(lines), look))
    # As wide as it is: a line that is too long for the terminal is not cut, so that it can be copied.
    width = start + max((cell_len(line) for lines in last for line in lines), default=0) + 2
    console = Console(
        file=io.StringIO(), width=width, color_system=style.colours, force_terminal=style.colour, _environ={}
    )
    with console.capture() as captured:
        console.print(table)
    return [f"{indent}{line}".rstrip() for line in captured.get().split("\n")[:-1]]


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
