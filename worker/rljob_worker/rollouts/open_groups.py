"""A group on its way through the steps that it outlasts, and as a checkpoint holds it. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rljob_worker.flow import Episode, Finish, Group, TokenStream
from rljob_worker.flow.streams import packed, unpacked
from rljob_worker.rewards.weighted_parts import RewardResult
from rljob_worker.types import ExpertArray, Generation, GenerationRequest, Prompt


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that is neither trained on nor filtered yet.

    Attributes:
        group: its samples as far as they are.
        seed: of its first sample; the others follow. It stays the same in whichever step the group goes on.
        results: its rewards, once it is complete; none while they are waited for.
        deferred_at: number of the step that deferred it; None: none did. Only with tail batching.
    """

    group: Group
    seed: int
    results: tuple[RewardResult, ...] = ()
    deferred_at: int | None = None

    @classmethod
    def begun(cls, ordinal: int, prompt: Prompt, samples: int, seed: int, version: int) -> OpenGroup:
        """A group that has nothing but its prompt, for weights of `version`."""
        stream = TokenStream.of_prompt(prompt.token_ids)
        episodes = tuple(Episode(ordinal, sample, stream) for sample in range(samples))
        return cls(Group(ordinal, version, episodes), seed)

    def at(self, version: int) -> OpenGroup:
        """As the step of weights `version` finds it: where nothing was sampled yet, it begins there."""
        if any(episode.stream.num_sampled for episode in self.group.episodes):
            return self
        return replace(self, group=replace(self.group, admitted_version=version))

    def anew(self) -> OpenGroup:
        """Without what was sampled of it."""
        episodes = tuple(
            Episode(one.ordinal, one.sample, TokenStream.of_prompt(one.stream.ids[: one.stream.prompt_length]))
            for one in self.group.episodes
        )
        return replace(self, group=replace(self.group, episodes=episodes), results=())

    def renewed(self, version: int) -> OpenGroup:
        """Without what was sampled of it, which is too old, for weights of `version`."""
        one = self.anew().at(version)
        return replace(one, group=replace(one.group, renewed=True))

    def requests(self) -> list[tuple[int, GenerationRequest]]:
        """What is missing, with the number of the sample."""
        return [
            (
                episode.sample,
                GenerationRequest(
                    prompt_token_ids=tuple(episode.stream.ids[: episode.stream.prompt_length].tolist()),
                    seed=self.seed + episode.sample,
                    sampled_token_ids=tuple(episode.stream.ids[episode.stream.prompt_length :].tolist()),
                    group=self.group.ordinal,
                ),
            )
            for episode in self.group.episodes
            if episode.finish is None
        ]

    def extended(self, sample: int, generation: Generation, version: int) -> OpenGroup:
        """With what weights of `version` added to a sample."""
        before = self.group.episodes[sample]
        after = replace(
            before,
            stream=before.stream.append_sampled(generation.token_ids, generation.log_probs, version=version),
            finish=Finish(generation.finish_reason) if generation.finish_reason else None,
            stop_text=generation.stop_text,
            experts=generation.experts if generation.finish_reason else None,
        )
        episodes = (*self.group.episodes[:sample], after, *self.group.episodes[sample + 1 :])
        return replace(self, group=replace(self.group, episodes=episodes))

    def generations(self) -> list[Generation]:
        """Each sample's response, from whatever weights its parts are."""
        return [_generation(episode) for episode in self.group.episodes]

    @property
    def num_sampled(self) -> int:
        """Tokens so far."""
        return sum(episode.stream.num_sampled for episode in self.group.episodes)

    def as_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` takes back to the same bits."""
        return {
            "ordinal": self.group.ordinal,
            "admitted_version": self.group.admitted_version,
            "seed": self.seed,
            "results": [asdict(result) for result in self.results],
            **({} if self.deferred_at is None else {"deferred_at": self.deferred_at}),
            **({"renewed": True} if self.group.renewed else {}),
            "episodes": [
                {
                    "stream": episode.stream.as_json(),
                    "finish": None if episode.finish is None else episode.finish.value,
                    "stop_text": episode.stop_text,
                    **({} if episode.experts is None else {"experts": _experts_as_json(episode.experts)}),
                }
                for episode in self.group.episodes
            ],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> OpenGroup:
        """What `as_json` gave; ValueError when it is not such a value."""
        try:
            ordinal = int(value["ordinal"])
            episodes = tuple(
                Episode(
                    ordinal,
                    sample,
                    TokenStream.from_json(episode["stream"]),
                    None if episode["finish"] is None else Finish(episode["finish"]),
                    episode["stop_text"],
                    _experts_from_json(episode["experts"]) if "experts" in episode else None,
                )
                for sample, episode in enumerate(value["episodes"])
            )
            results = tuple(RewardResult(**result) for result in value["results"])
            deferred = None if value.get("deferred_at") is None else int(value["deferred_at"])
            group = Group(ordinal, int(value["admitted_version"]), episodes, value.get("renewed") is True)
            made = cls(group, int(value["seed"]), results, deferred)
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise ValueError(f"not a group that was carried over: {error}") from error
        if results and len(results) != (len(episodes) if made.group.complete else 0):
            raise ValueError(f"the group of prompt {ordinal} has {len(episodes)} samples and {len(results)} rewards")
        return made


def prompt_tokens(group: Group) -> Sequence[int]:
    """The tokens that all its samples begin with."""
    stream = group.episodes[0].stream
    return tuple(stream.ids[: stream.prompt_length].tolist())


def _generation(episode: Episode) -> Generation:
    stream = episode.stream
    return Generation(
        np.array(stream.ids[stream.prompt_length :]),
        np.array(stream.log_probs[stream.prompt_length :]),
        "" if episode.finish is None else episode.finish.value,
        episode.stop_text,
    )


def _experts_as_json(experts: ExpertArray) -> dict[str, Any]:
    dtype = "<u1" if experts.dtype == np.uint8 else "<u2"
    return {"shape": list(experts.shape), "dtype": dtype, "values": packed(experts, dtype)}


def _experts_from_json(value: dict[str, Any]) -> ExpertArray:
    dtype = value["dtype"]
    if dtype not in ("<u1", "<u2"):
        raise ValueError(f"experts of type {dtype!r}")
    experts: ExpertArray = unpacked(value["values"], dtype).reshape(value["shape"])
    return experts
