"""Display for a person while a job runs: one live line on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from rljob_api.safe_text import visible_block, visible_line
from rljob_api.wire.step_record import StepRecord
from rljob_worker.report.text import number

_PLAIN_SECONDS = 5.0
_REFRESH_PER_SECOND = 4


class RunProgress:
    """Shows step / steps, time left, reward and the last step's largest phases; a context manager."""

    def __init__(self, console: Console, steps: int, phases_shown: int = 4) -> None:
        self._console = console
        self._steps = steps
        self._shown = phases_shown
        self._last_line: float | None = None
        self._seconds = 0.0
        self.executed = 0
        """Steps that were shown."""
        detail = TextColumn("{task.fields[detail]}", markup=False, table_column=Column(no_wrap=True, ratio=1))
        self._progress = Progress(
            TextColumn("[bold]{task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=16),
            detail,
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=_REFRESH_PER_SECOND,
            expand=True,
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
        self._print(f"rljob: {sentence}")

    def record(self, record: StepRecord) -> None:
        """Show a finished step, or the evaluation before the first one."""
        if not record.is_step:
            found = "  ".join(f"{n} {number(record.metric(n))}" for n in record.metrics if n.startswith("eval/"))
            self.event(f"evaluated before training in {_seconds(record.step_seconds)}: {found}")
            return
        self._seconds += record.step_seconds
        self.executed += 1
        left = self._seconds / self.executed * (self._steps - record.step)
        detail = f"eta {_clock(left)}  {self._detail(record)}"
        self._progress.update(self._task, completed=record.step, detail=detail)
        if not self._console.is_terminal and self._line_due(record.step):
            self._print(f"step {record.step}/{self._steps}  {detail}")

    def _line_due(self, step: int) -> bool:
        now = time.monotonic()
        due = self._last_line is None or now - self._last_line >= _PLAIN_SECONDS or step == self._steps
        if due:
            self._last_line = now
        return due

    def _detail(self, record: StepRecord) -> str:
        largest = sorted(record.phases.items(), key=lambda item: -item[1])[: self._shown]
        phases = "  ".join(f"{visible_line(name)} {_seconds(value)}" for name, value in largest)
        reward = number(record.reward)
        return f"reward {reward}  step {_seconds(record.step_seconds)}  {phases}"

    def _print(self, line: str) -> None:
        self._console.print(visible_block(line, "  "), highlight=False, markup=False, soft_wrap=True)


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
