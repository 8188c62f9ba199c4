"""Step records as any reader of `steps.jsonl` gets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_steps(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of a run, without the worker's own reader: what is written there is what others see."""
    return [json.loads(line) for line in (run_folder / "steps.jsonl").read_bytes().split(b"\n")[:-1]]
