"""Figures of benchmarks, in one manner: a row of a Markdown table each, and exit code 1 when one misses its limit."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

HEADER = "| what | against | ratio | goal | |\n|---|---|---|---|---|"
MISSED = "missed"


@dataclass(frozen=True)
class Figure:
    """One figure and its limit."""

    what: str
    against: str
    value: float
    limit: float
    at_most: bool = False
    """The limit is the highest value that passes, not the lowest."""
    note: str = ""
    """The parts of the ratio."""

    @property
    def passes(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        """The row."""
        note = f" ({self.note})" if self.note else ""
        goal = f"at {'most' if self.at_most else 'least'} {self.limit:g}"
        verdict = "ok" if self.passes else MISSED
        return f"| {self.what} | {self.against} | {self.value:.2f}{note} | {goal} | {verdict} |"


def report(figures: Sequence[Figure]) -> int:
    """Print the rows; the exit code."""
    print(*figures, sep="\n", flush=True)
    return int(not all(figure.passes for figure in figures))


def add_processor_time(parser: argparse.ArgumentParser) -> None:
    """Add `--processor-time`, for a machine that does other work beside the benchmark."""
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count the processor time of one thread, on a machine that others use too",
    )
