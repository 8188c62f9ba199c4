"""Progress of work that is counted: one live line on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from rljob_api.safe_text import visible_line

_PLAIN_SECONDS = 5.0


class CountedProgress:
    """Shows how many of how many are done; a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_line = time.monotonic()
        self._what, self._done, self._total = "", 0, 0
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            expand=True,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> CountedProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, what: str, total: int) -> None:
        """Count from 0, something else."""
        self._what, self._done, self._total = visible_line(what), 0, total
        self._progress.reset(self._task, total=total, description=self._what)

    def advance(self, count: int) -> None:
        """Count so many more."""
        self._done += count
        self._progress.advance(self._task, count)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line >= _PLAIN_SECONDS:
            self._last_line = now
            line = f"rljob: {self._what}: {self._done}/{self._total}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
