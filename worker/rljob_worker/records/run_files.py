"""What makes a folder a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rljob_worker.errors import UserError


def require_run_folder(folder: Path) -> dict[str, Any]:
    """The content of `run.json`; UserError when the folder holds no run."""
    try:
        return dict(json.loads((folder / "run.json").read_text()))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder}: not a run folder (it has no run.json)") from None
