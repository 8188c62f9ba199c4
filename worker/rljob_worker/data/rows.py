"""Facts of a data set's rows that only the job can judge: they are gathered while all rows are looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(slots=True)
class RowFacts:
    """Facts of the rows of one source."""

    roles: dict[str, str] = field(default_factory=dict)
    """Role of a chat message -> place of the first row that has it."""
    blank_label: str | None = None
    """Place of the first row whose label is empty."""

    def note_messages(self, messages: list[dict[str, Any]] | None, place: str) -> None:
        """The roles of a prompt's messages."""
        for message in messages or ():
            if message["role"] not in self.roles:
                self.roles[message["role"]] = place

    def note_label(self, text: str, place: str) -> None:
        """A label, as rewards see it."""
        if self.blank_label is None and not text.strip():
            self.blank_label = place
