"""What follows a generation of a sample: today nothing, for an episode is one answer to its prompt."""

from __future__ import annotations

from enum import StrEnum

from rljob_worker.flow import Episode


class Next(StrEnum):
    """What follows."""

    DONE = "done"
    """Nothing: the sample is complete."""
    GOES_ON = "goes on"
    """The same answer: it was cut."""


class Turns:
    """Episodes of one turn."""

    def next(self, episode: Episode) -> Next:
        """What follows what was just added to an episode."""
        return Next.GOES_ON if episode.finish is None else Next.DONE
