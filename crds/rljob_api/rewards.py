"""What manifest and worker both know of rewards."""

from __future__ import annotations

from typing import Any


def part_name(part: Any) -> str:
    """The name by which a part of a reward is recorded: its own, that of the built-in reward, or the function's."""
    return str(part.record_as or part.name or (part.python or "").rpartition(":")[2])
