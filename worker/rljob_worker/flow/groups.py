"""A prompt's samples on their way through generation, reward and training."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rljob_worker.flow.streams import TokenStream
from rljob_worker.types import ExpertArray


class Finish(StrEnum):
    """Why an episode's generation ended."""

    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"
    """The longest response allowed."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One sample of a prompt.

    Attributes:
        ordinal: number of the prompt in the data.
        sample: number of the sample within its group.
        stream: its tokens so far.
        finish: why it ended; None while it may go on.
        stop_text: the stop string that ended it, if any.
        experts: of a finished one, those that the engine sent each token but the last to, where the trainer is to do
            the same: [tokens - 1, layers with experts, experts of a token]. What may go on has none: its next reading
            tells those of all tokens.

    Raises:
        ValueError: there are experts of more or fewer tokens.
    """

    ordinal: int
    sample: int
    stream: TokenStream
    finish: Finish | None = None
    stop_text: str | None = None
    experts: ExpertArray | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.experts is not None and len(self.experts) != len(self.stream) - 1:
            raise ValueError(
                f"sample {self.sample} of prompt {self.ordinal} has {len(self.stream)} tokens and experts of "
                f"{len(self.experts)}; all but the last have some"
            )

    @property
    def response_length(self) -> int:
        """Tokens after the prompt."""
        return len(self.stream) - self.stream.prompt_length


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt: what an advantage is relative to, and what is trained on together.

    Attributes:
        ordinal: number of the prompt in the data.
        admitted_version: the newest weights when its generation began.
        episodes: its samples, by number.
        renewed: whether what was first sampled of it was dropped for its age (`flow.limits`).

    Raises:
        ValueError: an episode is another prompt's, or their numbers are not 0, 1, 2, ...
    """

    ordinal: int
    admitted_version: int
    episodes: tuple[Episode, ...]
    renewed: bool = False

    def __post_init__(self) -> None:
        numbers = [(episode.ordinal, episode.sample) for episode in self.episodes]
        if numbers != [(self.ordinal, sample) for sample in range(len(self.episodes))] or not numbers:
            raise ValueError(f"group of prompt {self.ordinal}: its episodes are {numbers} (prompt, sample)")

    @property
    def complete(self) -> bool:
        """Whether all samples have ended."""
        return all(episode.finish is not None for episode in self.episodes)

    @property
    def oldest_version(self) -> int:
        """The lowest version that sampled a token of it; the version it was admitted at where nothing was."""
        versions = [episode.stream.oldest_version for episode in self.episodes]
        return min((version for version in versions if version is not None), default=self.admitted_version)

    @property
    def newest_version(self) -> int:
        """The highest version that sampled a token of it; the version it was admitted at where nothing was."""
        versions = [episode.stream.newest_version for episode in self.episodes]
        return max((version for version in versions if version is not None), default=self.admitted_version)

    def lag(self, version: int) -> int:
        """How many versions older than `version` its oldest token is: the staleness that is bounded."""
        return version - self.oldest_version
