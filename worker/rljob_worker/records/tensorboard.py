"""Step records as TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoardSink:
    """Writes each record's metrics as scalars at its step."""

    def __init__(self, run_folder: Path) -> None:
        self._writer = SummaryWriter(str(run_folder / FOLDER), flush_secs=10)

    def __call__(self, record: dict[str, Any]) -> None:
        """Add one record."""
        for name, value in record["metrics"].items():
            if value is not None:
                self._writer.add_scalar(name, value, record["step"], walltime=record["time"])
        self._writer.add_scalar("perf/other_time", record["other"], record["step"], walltime=record["time"])
        self._writer.add_scalar("perf/switch_time", record["switch_seconds"], record["step"], walltime=record["time"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
