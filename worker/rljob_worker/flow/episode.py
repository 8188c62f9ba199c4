"""One sample of a prompt: its tokens, and the turns that an environment answered."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from rljob_worker.flow.streams import SpanKind, TokenStream, packed, unpacked
from rljob_worker.flow.turns import Budget, Finish, Opening, Turn, TurnEnd
from rljob_worker.types import ExpertArray, Generation, GenerationRequest, IntArray


@dataclass(frozen=True, slots=True)
class Episode:
    """One sample of a prompt.

    Attributes:
        ordinal: number of the prompt in the data.
        sample: number of the sample within its group.
        stream: its tokens so far; with several streams, the one that grows.
        finish: why it ended; None while it may go on.
        stop_text: the stop string that ended it, if any.
        experts: of a finished one, those that the engine sent each token but the last to, where the trainer is to do
            the same: [tokens - 1, layers with experts, experts of a token]. What may go on has none: its next reading
            tells those of all tokens.
        text: of a finished one, its response in words, once it was decoded; a checkpoint does not hold it.
        opening: how its environment began; None: it has none, and is one answer.
        turns: answers that the environment has answered.
        answered: how its newest answer ended, which the environment has not answered yet; None: there is no such one.
        restarts: how often it began anew, for its environment was lost and could not be made again as it was.
        number: of `stream` among the sample's streams; an agent that rewrites its conversation opens further ones.
        aside: the other streams with their numbers, which are in order.

    Raises:
        ValueError: there are experts of more or fewer tokens, or the streams are not numbered 0, 1, 2, ...
    """

    ordinal: int
    sample: int
    stream: TokenStream
    finish: Finish | None = None
    stop_text: str | None = None
    experts: ExpertArray | None = field(default=None, compare=False)
    text: str | None = field(default=None, compare=False)
    opening: Opening | None = None
    turns: tuple[Turn, ...] = ()
    answered: TurnEnd | None = None
    restarts: int = 0
    number: int = 0
    aside: tuple[tuple[int, TokenStream], ...] = ()

    def __post_init__(self) -> None:
        if (self.number or self.aside) and [n for n, _ in self._numbered] != list(range(1 + len(self.aside))):
            raise ValueError(
                f"sample {self.sample} of prompt {self.ordinal}: its streams have the numbers "
                f"{[n for n, _ in self._numbered]}"
            )
        if self.experts is not None and len(self.experts) != len(self.stream) - 1:
            raise ValueError(
                f"sample {self.sample} of prompt {self.ordinal} has {len(self.stream)} tokens and experts of "
                f"{len(self.experts)}; all but the last have some"
            )

    @property
    def _numbered(self) -> list[tuple[int, TokenStream]]:
        return sorted((*self.aside, (self.number, self.stream)), key=lambda one: one[0])

    @property
    def streams(self) -> tuple[TokenStream, ...]:
        """All its streams by number: each sampled token is in one of them, once."""
        return tuple(stream for _, stream in self._numbered) if self.aside else (self.stream,)

    @property
    def answers(self) -> list[tuple[int, IntArray]]:
        """Stream of each answer by number, and the places of its tokens there, in the order of turns."""
        found: dict[tuple[int, int], list[IntArray]] = {}
        for number, stream in enumerate(self.streams):
            for span in stream.spans:
                if span.kind is SpanKind.SAMPLED:
                    found.setdefault((number, span.turn), []).append(np.arange(span.start, span.stop))
        by_stream = {number: [key for key in found if key[0] == number] for number in range(len(self.streams))}
        # What no turn is about yet is the newest answer.
        order = [by_stream[turn.stream].pop(0) for turn in self.turns if by_stream[turn.stream]]
        order += [key for keys in by_stream.values() for key in keys]
        return [(key[0], np.concatenate(found[key])) for key in order]

    @property
    def sampled_length(self) -> int:
        """Tokens that the policy sampled: those of the response, or of all answers."""
        return sum([stream.num_sampled for stream in self.streams])

    @property
    def generation(self) -> Generation:
        """All that was sampled, from whatever weights its parts are; without experts."""
        stream = self.stream
        reason = "" if self.finish is None else self.finish.value
        if self.opening is not None:
            ids = np.concatenate([one.ids[one.sampled] for one in self.streams])
            return Generation(
                ids, np.concatenate([one.log_probs[one.sampled] for one in self.streams]), reason, self.stop_text
            )
        # A slice where all of it is one answer: a mask of all tokens takes ten times as long.
        sampled = slice(stream.prompt_length, None)
        return Generation(stream.ids[sampled], stream.log_probs[sampled], reason, self.stop_text)

    def whole(self, added: Generation) -> Generation:
        """Its newest answer as it will be with what is added to it."""
        start = self.answer_start
        if len(self.stream) == start:
            return added
        ids = np.concatenate([self.stream.ids[start:], added.token_ids])
        log_probs = np.concatenate([self.stream.log_probs[start:], added.log_probs])
        return Generation(ids, log_probs, added.finish_reason, added.stop_text)

    @property
    def answer_start(self) -> int:
        """Index in the stream of the first token of its newest answer, or of the one to come."""
        for span in reversed(self.stream.spans):
            if span.kind is not SpanKind.SAMPLED:
                return span.stop
        raise AssertionError("a stream begins with its prompt")

    @property
    def answer(self) -> Generation:
        """Its newest answer, as far as there is one."""
        start, stream = self.answer_start, self.stream
        reason = "" if self.answered is None else self.answered.value
        return Generation(np.array(stream.ids[start:]), np.array(stream.log_probs[start:]), reason, self.stop_text)

    @property
    def ended_by(self) -> int | None:
        """The token that ended its newest answer; None where that was cut, or ended by a stop string."""
        ended = self.answered is TurnEnd.STOP and self.stop_text is None
        return int(self.stream.ids[-1]) if ended else None

    def with_sampled(self, generation: Generation, version: int, text: str | None = None) -> Episode:
        """With what weights of `version` added, and the text of the response where it ends with that."""
        reason, alone = generation.finish_reason, self.opening is None
        # Named one by one: `replace` takes three times as long, and each sample of a step comes by here.
        return Episode(
            ordinal=self.ordinal,
            sample=self.sample,
            stream=self.stream.append_sampled(generation.token_ids, generation.log_probs, version=version),
            finish=Finish(reason) if reason and alone else self.finish,
            stop_text=generation.stop_text,
            experts=generation.experts if reason else None,
            text=text,
            opening=self.opening,
            turns=self.turns,
            answered=TurnEnd(reason) if reason and not alone else self.answered,
            restarts=self.restarts,
            number=self.number,
            aside=self.aside,
        )

    def observed(self, turn: Turn, ids: Sequence[int]) -> Episode:
        """With what its environment gave for its newest answer, after which another one comes.

        Args:
            turn: the answer and what it gave.
            ids: tokens that are appended to the stream.

        Raises:
            ValueError: no answer waits for that, or there are no tokens: the next answer could not be separated from
                this.
        """
        self._must_wait()
        if not ids:
            raise ValueError(f"sample {self.sample} of prompt {self.ordinal}: a turn appends no tokens")
        # Named one by one, as above.
        return Episode(
            ordinal=self.ordinal,
            sample=self.sample,
            stream=self.stream.append_observed(ids),
            finish=self.finish,
            text=self.text,
            opening=self.opening,
            turns=(*self.turns, turn),
            restarts=self.restarts,
            number=self.number,
            aside=self.aside,
        )

    def called(self, turn: Turn, ids: Sequence[int], number: int) -> Episode:
        """With what its agent asked after its newest answer, which another answer follows.

        Args:
            turn: the answer and what the agent asked.
            ids: tokens that are appended to a stream, or with which a further one begins.
            number: of the stream; one more than there are opens it.

        Raises:
            ValueError: no answer waits for that, there are no tokens, or the number is none of these.
        """
        self._must_wait()
        streams = dict(self._numbered)
        if not ids or not 0 <= number <= len(streams):
            raise ValueError(
                f"sample {self.sample} of prompt {self.ordinal}: {len(ids)} tokens for stream {number}, and there are "
                f"{len(streams)}"
            )
        before = streams.pop(number, None)
        stream = TokenStream.of_prompt(ids) if before is None else before.append_observed(ids)
        return replace(
            self,
            stream=stream,
            number=number,
            aside=tuple(streams.items()),
            turns=(*self.turns, turn),
            answered=None,
            stop_text=None,
            experts=None,
        )

    def ended(self, turn: Turn, finish: Finish) -> Episode:
        """With the last that its environment gave; ValueError where no answer waits for that."""
        self._must_wait()
        return replace(self, turns=(*self.turns, turn), answered=None, finish=finish, text=turn.action)

    def not_begun(self, turn: Turn) -> Episode:
        """With the failure of an environment that did not begin: nothing is sampled."""
        return replace(self, turns=(turn,), finish=Finish.FAILED, text="")

    def _must_wait(self) -> None:
        if self.answered is None:
            raise ValueError(f"sample {self.sample} of prompt {self.ordinal}: no answer waits for its environment")

    def from_prompt(self) -> Episode:
        """Without what was sampled."""
        first = self.streams[0]
        prompt = TokenStream.of_prompt(first.ids[: first.prompt_length])
        return Episode(self.ordinal, self.sample, prompt, opening=self.opening, restarts=self.restarts)

    def request(self, seed: int, budget: Budget | None, prompt: tuple[int, ...]) -> GenerationRequest | None:
        """Request to an engine to go on with it; None: nothing, it has ended or its environment is asked.

        Args:
            seed: of its noise; a further stream has its own of it.
            budget: of episodes with environments.
            prompt: the tokens of its group's prompt, which are taken where it has no environment.
        """
        if self.finish is not None or self.answered is not None:
            return None
        ids = self.stream.ids
        most: int | None = None
        start = len(prompt) if self.opening is None else self.answer_start
        if self.opening is not None:
            assert budget is not None
            following = budget.next(start, len(self.turns))
            assert not isinstance(following, Finish), "an episode that may say no more has not ended"
            most = following
            prompt = tuple(ids[:start].tolist())
        return GenerationRequest(
            prompt_token_ids=prompt,
            seed=stream_seed(seed, self.number),
            sampled_token_ids=tuple(ids[start:].tolist()) if start < len(ids) else (),
            group=self.ordinal,
            max_tokens=most,
        )

    def as_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` takes back to the same bits, but for the text of a response."""
        stream = self.stream.as_json()
        return {
            "stream": stream,
            "finish": None if self.finish is None else self.finish.value,
            "stop_text": self.stop_text,
            **({} if self.experts is None else {"experts": _experts_as_json(self.experts)}),
            **_turns_as_json(self),
            **_aside_as_json(self),
        }

    @classmethod
    def from_json(cls, ordinal: int, sample: int, value: dict[str, Any]) -> Episode:
        """Episode from `as_json`; KeyError, TypeError, ValueError or zlib.error when it is not such a value."""
        stream = TokenStream.from_json(value["stream"])
        return cls(
            ordinal,
            sample,
            stream,
            None if value["finish"] is None else Finish(value["finish"]),
            value["stop_text"],
            _experts_from_json(value["experts"]) if "experts" in value else None,
            **_turns_from_json(value),
            **_aside_from_json(value),
        )


def stream_seed(seed: int, number: int) -> int:
    """Seed of the noise of a sample's stream, below 2**62 for a further one.

    Noise is keyed by seed and place: an agent that asks the same twice would get the same answer twice otherwise.
    """
    if not number:
        return seed
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def _turns_as_json(episode: Episode) -> dict[str, Any]:
    """Nothing for an episode of one answer: as versions without environments had it."""
    if episode.opening is None:
        return {}
    return {
        "opening": asdict(episode.opening),
        "turns": [_turn_as_json(turn) for turn in episode.turns],
        "answered": None if episode.answered is None else episode.answered.value,
        "restarts": episode.restarts,
    }


def _turns_from_json(value: dict[str, Any]) -> dict[str, Any]:
    if "opening" not in value:
        return {}
    return {
        "opening": Opening(**value["opening"]),
        "turns": tuple(Turn(**turn) for turn in value["turns"]),
        "answered": None if value["answered"] is None else TurnEnd(value["answered"]),
        "restarts": int(value["restarts"]),
    }


def _turn_as_json(turn: Turn) -> dict[str, Any]:
    """Without the stream where it is the first, as it is in an episode that has no other."""
    value = asdict(turn)
    return value if turn.stream else {name: one for name, one in value.items() if name != "stream"}


def _aside_as_json(episode: Episode) -> dict[str, Any]:
    if not episode.aside:
        return {}
    return {"number": episode.number, "aside": [[number, one.as_json()] for number, one in episode.aside]}


def _aside_from_json(value: dict[str, Any]) -> dict[str, Any]:
    if "aside" not in value:
        return {}
    aside = tuple((int(number), TokenStream.from_json(stream)) for number, stream in value["aside"])
    return {"number": int(value["number"]), "aside": aside}


def _experts_as_json(experts: ExpertArray) -> dict[str, Any]:
    dtype = "<u1" if experts.dtype == np.uint8 else "<u2"
    return {"shape": list(experts.shape), "dtype": dtype, "values": packed(experts, dtype)}


def _experts_from_json(value: dict[str, Any]) -> ExpertArray:
    dtype = value["dtype"]
    if dtype not in ("<u1", "<u2"):
        raise ValueError(f"experts of type {dtype!r}")
    experts: ExpertArray = unpacked(value["values"], dtype).reshape(value["shape"])
    return experts
