"""What a person sees while a job runs: one live line on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_PLAIN_SECONDS = 5.0


class RunProgress:
    """Shows step / steps, time left, reward and the last step's largest phases; a context manager."""

    def __init__(self, console: Console, steps: int, phases_shown: int = 4) -> None:
        self._console = console
        self._steps = steps
        self._shown = phases_shown
        self._last_line = 0.0
        self._started: float | None = None
        self._first_step = 0
        self._progress = Progress(
            TextColumn("[bold]{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("steps", total=steps, detail="starting")

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def event(self, sentence: str) -> None:
        """Say what the job is doing."""
        self._console.print(f"[dim]rljob:[/] {sentence}", highlight=False)

    def record(self, record: dict[str, Any]) -> None:
        """Show a finished step."""
        detail = self._detail(record)
        self._progress.update(self._task, completed=record["step"], detail=detail)
        now = time.monotonic()
        if self._started is None:
            self._started, self._first_step = now - record["step_seconds"], record["step"] - 1
        last = record["step"] == self._steps
        if not self._console.is_terminal and (now - self._last_line >= _PLAIN_SECONDS or last):
            self._last_line = now
            pace = (now - self._started) / (record["step"] - self._first_step)
            left = pace * (self._steps - record["step"])
            self._console.print(f"step {record['step']}/{self._steps}  eta {left:.0f} s  {detail}", highlight=False)

    def _detail(self, record: dict[str, Any]) -> str:
        largest = sorted(record["phases"].items(), key=lambda item: -item[1])[: self._shown]
        phases = "  ".join(f"{name} {_seconds(value)}" for name, value in largest)
        reward = record["metrics"]["rollout/raw_reward"]
        return f"reward {reward:.3f}  step {_seconds(record['step_seconds'])}  ({phases})"


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
