"""Boxes and arrows: what the pictures of the docs are drawn with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams |= {"svg.hashsalt": "rljob", "font.family": "DejaVu Sans", "font.size": 9}

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

INK, PAPER = "#1f2937", "#ffffff"
USER, OPERATOR, DRIVER, TRAINER, ENGINE, FRAME = "#fef3c7", "#dbeafe", "#e0e7ff", "#dcfce7", "#fae8ff", "#f3f4f6"


class Drawing:
    """Boxes and arrows on a page that is 100 units wide; ten of them are an inch."""

    def __init__(self, height: float = 62) -> None:
        self.figure, self.axes = plt.subplots(figsize=(10, height / 10))
        self.axes.set(xlim=(0, 100), ylim=(0, height))
        self.axes.axis("off")
        self.figure.subplots_adjust(0, 0, 1, 1)

    def box(self, x: float, y: float, width: float, height: float, title: str, text: str, color: str) -> None:
        """A box with a title and lines below it."""
        style = FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=1.2", facecolor=color, edgecolor=INK, linewidth=1
        )
        self.axes.add_patch(style)
        self.axes.text(x + 1.3, y + height - 1.2, title, va="top", weight="bold", color=INK)
        self.axes.text(x + 1.3, y + height - 4.1, text, va="top", color=INK, fontsize=8, linespacing=1.35)

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], text: str = "", at: tuple[float, float] = (0, 0)
    ) -> None:
        """An arrow, and what it says at another place."""
        self.axes.annotate(
            "", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
        )
        self.axes.text(*at, text, color=INK, fontsize=7.5, linespacing=1.3, va="center")

    def bar(self, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
        """A box without a title, its text in the middle."""
        self.axes.add_patch(plt.Rectangle((x, y), width, height, facecolor=color, edgecolor=INK, linewidth=0.8))
        self.axes.text(
            x + width / 2, y + height / 2, text, ha="center", va="center", color=INK, fontsize=7, linespacing=1.25
        )

    def note(self, x: float, y: float, text: str, **font: object) -> None:
        """Text beside boxes; its first line is at `y`."""
        self.axes.text(x, y, text, va="top", color=INK, linespacing=1.35, **{"fontsize": 8, **font})


def save(draw: Callable[[], Drawing], target: Path) -> None:
    """Draw into a file, the same bytes each time where it is an SVG."""
    draw().figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=150)


def main(pictures: dict[str, Callable[[], Drawing]], folder: Path) -> None:
    """Write all pictures as SVG into `folder`, or as PNG into the folder that the command line names."""
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    for name, draw in pictures.items():
        save(draw, given / f"{name}.png" if given else folder / f"{name}.svg")
