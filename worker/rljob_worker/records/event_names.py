"""Names of events in `events.jsonl` that others than their writer look for."""

from __future__ import annotations

CHECKPOINT_SET_ASIDE = "checkpoint_set_aside"
"""A damaged checkpoint was given another name, and the one before it is used."""
REWARD_PARTS_LEFT_OUT = "reward_parts_left_out"
"""Named parts of the reward have no metric: there are too many, or their names are not fit for one."""
RESHARDED = "resharded"
"""A checkpoint of another parallel layout was continued from."""
WRITE_FAILED = "write_failed"
"""Something that the run can go on without could not be written, for the first time in this attempt."""
ENGINE_LOST = "engine_lost"
"""An engine died, and the others go on: `engine`, and how many are `left`."""
ENGINE_JOINED = "engine_joined"
"""One that was made in its place, or since more are wanted, takes part: `engine`."""
ENGINE_LEFT = "engine_left"
"""Fewer are wanted, and one takes part no more: `engine`, and how many are `left`."""
