"""A reward that makes a step last a while without computing: it leaves the processors to what a test waits for."""

from __future__ import annotations

from pathlib import Path

_SCORE = """\
import asyncio


async def score(response):
    await asyncio.sleep({seconds})
    return float(len(response) % 3)
"""


def write_slow_reward(folder: Path, seconds: float) -> None:
    """Write module `pace` with the reward `score`, which takes so many seconds."""
    (folder / "pace.py").write_text(_SCORE.format(seconds=seconds))
