"""Prompts as the pool of groups takes them from a job's data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from rljob_worker.types import Prompt


class PromptData(Protocol):
    """The data of a job, `data.dataset.PromptSource`."""

    @property
    def mended(self) -> tuple[str, ...]:
        """Rows that have another content since the cursor was saved that was restored."""
        ...

    def next_prompts(self, count: int, /) -> list[Prompt]:
        """The next prompts in the order of the job."""
        ...

    def prompts_of(self, uids: Sequence[str]) -> list[Prompt]:
        """Prompts by uid; ValueError where there is none."""
        ...

    def skips(self, uid: str) -> bool:
        """Whether a row is left out."""
        ...

    def state(self) -> dict[str, Any]:
        """The cursor, as a JSON value."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; UserError where it is of other data."""
        ...


class NumberedPrompt(NamedTuple):
    """A prompt and its ordinal: its number in the data, in the order of this job."""

    ordinal: int
    prompt: Prompt
