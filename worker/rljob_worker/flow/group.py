"""A prompt's samples on their way through generation, reward and training, and as a checkpoint holds them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from rljob_worker.flow.episode import Episode
from rljob_worker.flow.streams import TokenStream
from rljob_worker.flow.turns import Budget, Opening
from rljob_worker.types import FloatArray, Generation, GenerationRequest, Prompt, RewardResult


class Decision(StrEnum):
    """Fate of a prompt and its group."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """A filter took it: its prompt does not come again."""
    SURPLUS = "surplus"
    """The step had enough before it: its prompt is sampled again, in the next step or a later one."""
    SKIPPED = "skipped"
    """Its row was to be left out: no sample of it counts."""


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt: what an advantage is relative to, and what is trained on together.

    Attributes:
        ordinal: number of the prompt in the data.
        admitted_version: the newest weights when its generation began.
        episodes: its samples, by number.
        renewed: whether what was first sampled of it was dropped for its age (`flow.limits`).
        seed: of its first sample; the others follow. It stays the same in whichever step the group goes on.
        prompt_uid: of its prompt; empty in one that a checkpoint holds, until its prompt is drawn.
        results: its rewards, once it is complete; none while they are waited for.
        kept: what the job's function (`rollout.oversampling.function`) said of it with its rewards; None: it was not
            asked.
        deferred_at: number of the step that deferred it; None: none did. Only with tail batching.
        decision: what a step did with it; None: no step has taken it.

    Raises:
        ValueError: an episode is another prompt's, or their numbers are not 0, 1, 2, ...
    """

    ordinal: int
    admitted_version: int
    episodes: tuple[Episode, ...]
    renewed: bool = False
    seed: int = 0
    prompt_uid: str = ""
    results: tuple[RewardResult, ...] = ()
    kept: bool | None = None
    deferred_at: int | None = None
    decision: Decision | None = None

    def __post_init__(self) -> None:
        numbers = [(episode.ordinal, episode.sample) for episode in self.episodes]
        if numbers != [(self.ordinal, sample) for sample in range(len(self.episodes))] or not numbers:
            raise ValueError(f"group of prompt {self.ordinal}: its episodes are {numbers} (prompt, sample)")

    @property
    def complete(self) -> bool:
        """Whether all samples have ended."""
        return all(episode.finish is not None for episode in self.episodes)

    @property
    def open_samples(self) -> int:
        """Number of samples that have not ended."""
        return sum(episode.finish is None for episode in self.episodes)

    @property
    def oldest_version(self) -> int:
        """The lowest version that sampled a token of it; the version it was admitted at where nothing was."""
        versions = [stream.oldest_version for episode in self.episodes for stream in episode.streams]
        return min((version for version in versions if version is not None), default=self.admitted_version)

    @property
    def newest_version(self) -> int:
        """The highest version that sampled a token of it; the version it was admitted at where nothing was."""
        versions = [stream.newest_version for episode in self.episodes for stream in episode.streams]
        return max((version for version in versions if version is not None), default=self.admitted_version)

    def staleness(self, version: int) -> int:
        """Number of versions by which its oldest token is older than `version`: the staleness that is bounded."""
        return version - self.oldest_version

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The tokens that all its samples begin with."""
        stream = self.episodes[0].stream
        return tuple(stream.ids[: stream.prompt_length].tolist())

    @property
    def rewards(self) -> FloatArray:
        """[G] float32, of its results."""
        return np.array([result.score for result in self.results], dtype=np.float32)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample that the policy sampled."""
        return [episode.sampled_length for episode in self.episodes]

    @classmethod
    def begun(cls, ordinal: int, prompt: Prompt, samples: int, seed: int, version: int) -> Group:
        """A group that has nothing but its prompt, for weights of `version`."""
        stream = TokenStream.of_prompt(prompt.token_ids)
        episodes = tuple(Episode(ordinal, sample, stream) for sample in range(samples))
        return cls(ordinal, version, episodes, seed=seed, prompt_uid=prompt.uid)

    @classmethod
    def opened(
        cls, ordinal: int, prompt: Prompt, starts: Sequence[tuple[Opening, Sequence[int]]], seed: int, version: int
    ) -> Group:
        """A group whose samples have an environment each; `starts`: how they began, and the prompts made of that."""
        episodes = tuple(
            Episode(ordinal, sample, TokenStream.of_prompt(ids), opening=opening)
            for sample, (opening, ids) in enumerate(starts)
        )
        return cls(ordinal, version, episodes, seed=seed, prompt_uid=prompt.uid)

    def at(self, version: int) -> Group:
        """The group as the step of weights `version` finds it: where nothing was sampled yet, it begins there."""
        if any(episode.sampled_length for episode in self.episodes):
            return self
        return replace(self, admitted_version=version)

    def anew(self) -> Group:
        """Without what was sampled of it."""
        return replace(self.unscored(), episodes=tuple(one.from_prompt() for one in self.episodes))

    def unscored(self) -> Group:
        """Without its rewards and what was said of them."""
        return replace(self, results=(), kept=None)

    def sampled_again(self, version: int) -> Group:
        """Without what was sampled of it, which is too old, for weights of `version`."""
        return replace(self.anew().at(version), renewed=True)

    def requests(self, budget: Budget | None = None) -> list[tuple[int, GenerationRequest]]:
        """Requests to engines, with the number of the sample; `budget` is of episodes with environments.

        Requests of one prompt have one tuple of its tokens: it is sent to the engine, and made a list there, once.
        """
        prompt = self.prompt_tokens
        asked = ((one.sample, one.request(self.seed + one.sample, budget, prompt)) for one in self.episodes)
        return [(sample, request) for sample, request in asked if request is not None]

    def extended(self, parts: Mapping[int, Generation], version: int, texts: Mapping[int, str] | None = None) -> Group:
        """With what weights of `version` added, by sample, and the texts of responses that end with it."""
        texts = texts or {}
        grown = (self.episodes[i].with_sampled(part, version, texts.get(i)) for i, part in parts.items())
        return self.with_episodes(grown)

    def with_episodes(self, changed: Iterable[Episode]) -> Group:
        """With another state of some samples."""
        episodes = list(self.episodes)
        for episode in changed:
            episodes[episode.sample] = episode
        # Named one by one: `replace` takes as long as all else here, and each slice of what engines return comes by.
        return Group(
            ordinal=self.ordinal,
            admitted_version=self.admitted_version,
            episodes=tuple(episodes),
            renewed=self.renewed,
            seed=self.seed,
            prompt_uid=self.prompt_uid,
            results=self.results,
            kept=self.kept,
            deferred_at=self.deferred_at,
            decision=self.decision,
        )

    @property
    def num_sampled(self) -> int:
        """Tokens so far."""
        return sum(episode.sampled_length for episode in self.episodes)

    def as_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` takes back to the same bits, but for the prompt's uid and the decision."""
        return {
            "ordinal": self.ordinal,
            "admitted_version": self.admitted_version,
            "seed": self.seed,
            "results": [_result_as_json(result) for result in self.results],
            **({} if self.kept is None else {"kept": self.kept}),
            **({} if self.deferred_at is None else {"deferred_at": self.deferred_at}),
            **({"renewed": True} if self.renewed else {}),
            "episodes": [episode.as_json() for episode in self.episodes],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Group:
        """Group from `as_json`; ValueError when it is not such a value."""
        try:
            ordinal = int(value["ordinal"])
            episodes = tuple(
                Episode.from_json(ordinal, sample, episode) for sample, episode in enumerate(value["episodes"])
            )
            results = tuple(RewardResult(**result) for result in value["results"])
            deferred = None if value.get("deferred_at") is None else int(value["deferred_at"])
            made = cls(
                ordinal,
                int(value["admitted_version"]),
                episodes,
                value.get("renewed") is True,
                seed=int(value["seed"]),
                results=results,
                kept=None if value.get("kept") is None else value["kept"] is True,
                deferred_at=deferred,
            )
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise ValueError(f"not a group that was carried over: {error}") from error
        if results and len(results) != (len(episodes) if made.complete else 0):
            raise ValueError(f"the group of prompt {ordinal} has {len(episodes)} samples and {len(results)} rewards")
        return made


def _result_as_json(result: RewardResult) -> dict[str, Any]:
    """Without notes where there are none, which most rewards have not."""
    value = asdict(result)
    return value if result.notes else {name: one for name, one in value.items() if name != "notes"}
