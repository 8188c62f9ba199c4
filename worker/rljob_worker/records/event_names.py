"""Names of events in `events.jsonl` that others than their writer look for."""

from __future__ import annotations

CHECKPOINT_SET_ASIDE = "checkpoint_set_aside"
"""A damaged checkpoint was given another name, and the one before it is used."""
