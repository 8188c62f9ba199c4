"""Chat templates, which are programs of a model's author, within bounds of time and size."""

from __future__ import annotations

from collections.abc import Callable

from rljob_worker.host.interrupting import interrupted_after

RENDER_SECONDS = 10.0
"""A prompt takes milliseconds; loops within loops take as long as their author wants."""
RENDER_BYTES = 4 * 2**30
"""By which the process may grow meanwhile."""
MOST_CHARACTERS = 2**26
"""A sequence has at most 2^24 tokens; a tokenizer makes several times the bytes of a text."""


def within_bounds(render: Callable[[], object]) -> str:
    """The text that a template makes.

    Raises:
        TimeoutError, MemoryError, ValueError: it takes longer, takes more memory, or is longer than any prompt.
    """
    text = str(interrupted_after(RENDER_SECONDS, render, RENDER_BYTES))
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it makes {len(text)} characters of them, more than {MOST_CHARACTERS}")
    return text
