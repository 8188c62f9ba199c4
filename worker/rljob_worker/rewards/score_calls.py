"""Calls of rewards that were begun, and the waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rljob_worker.data.sources import TURNS
from rljob_worker.errors import JobError
from rljob_worker.flow.turns import Turn
from rljob_worker.rewards.functions import RewardFailure, Score, representable
from rljob_worker.rewards.weighted_parts import Part, join
from rljob_worker.types import Generation, Prompt, RewardResult

_WAYS_ON = (
    "; ways on: mend the row or the reward, reward.onError: Score, or data.skip (rljob run --resume --skip-prompt ROW)"
)


class RewardError(JobError):
    """A reward failed under `onError: Fail`, or did not end in time."""


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One response to score."""

    prompt: Prompt
    index: int
    """Number of the response within its prompt's group, from 0."""
    generation: Generation
    text: str | None = None
    """The response as `decode_responses` gives it, where the caller has it already."""
    ordinal: int | None = None
    """Number of the prompt in the data, where the caller tells results apart by it."""
    renewed: bool = False
    """Whether its group was sampled a second time: the result of the first is not that of the second."""
    turns: tuple[Turn, ...] = ()
    """Answers of an environment, where there is one; `text` is then the policy's last one, `generation` all of it."""


@dataclass(slots=True, eq=False)
class ScoreCall:
    """One call: a response and one part of its reward."""

    sample: RewardSample
    part: Part
    since: float
    """`time.monotonic()` of its submission."""
    result: RewardResult | None = None
    """Result, set by `ScoreCalls` under its lock."""
    failure: RewardFailure | None = None
    """Likewise."""


class ScoreCalls:
    """Calls that were submitted and not taken. One thread begins calls, one waits, and any says how they ended.

    Args:
        on_give_up: called before a wait ends with an error: what did not begin yet is not to begin.
    """

    def __init__(self, on_give_up: Callable[[], None]) -> None:
        self._on_give_up = on_give_up
        self._changed = threading.Condition()
        self._samples: list[list[ScoreCall]] = []
        """By sample, in the order of their submission: a call for each part of its reward."""
        self._open = 0
        self._failed: list[ScoreCall] = []
        self._round = 0

    @property
    def round(self) -> int:
        """Grows where all that was submitted is forgotten."""
        return self._round

    @property
    def outstanding(self) -> int:
        """Calls that have not ended."""
        with self._changed:
            return self._open

    def begin(self, samples: Sequence[list[ScoreCall]]) -> None:
        """Expect these, by sample."""
        with self._changed:
            self._samples += samples
            self._open += sum(map(len, samples))

    def end(self, outcomes: Sequence[tuple[ScoreCall, RewardResult | RewardFailure]], round_: int) -> None:
        """These calls, which were begun in that round, have their result or their failure."""
        with self._changed:
            if self._round != round_:
                return
            for call, outcome in outcomes:
                reward = call.sample.prompt.reward
                if isinstance(outcome, RewardResult):
                    call.result = outcome
                elif reward.on_error == "Score" and not outcome.outage:
                    call.result = RewardResult(reward.error_score, {}, outcome.text)
                else:
                    call.failure = outcome
                    self._failed.append(call)
            self._open -= len(outcomes)
            self._changed.notify_all()

    def take_all(self, deadline: float) -> list[tuple[RewardSample, RewardResult]]:
        """Same as `RewardRunner.take_all`."""
        with self._changed:
            while self._open and not self._failed:
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    break
            samples, failed = self._samples, self._failed
            unfinished = [calls for calls in samples if not _scored(calls)]
            self._forget()
        if failed or unfinished:
            self._give_up(failed, unfinished, len(samples))
        return [(calls[0].sample, _joined(calls)) for calls in samples]

    def take(self, patience: float, seconds: float) -> list[tuple[RewardSample, RewardResult]]:
        """Same as `RewardRunner.take`."""
        with self._changed:
            if not self._failed and not any(map(_scored, self._samples)):
                self._changed.wait(patience)
            submitted, failed = self._samples, self._failed
            scored = [calls for calls in submitted if _scored(calls)]
            self._samples = [calls for calls in submitted if not _scored(calls)]
            too_old = time.monotonic() - seconds
            overdue = [calls for calls in self._samples if calls[0].since < too_old]
            if failed or overdue:
                self._forget()
        if failed or overdue:
            self._give_up(failed, overdue, len(submitted))
        return [(calls[0].sample, _joined(calls)) for calls in scored]

    def _forget(self) -> None:
        """Forget all submitted calls. The caller holds the lock."""
        self._samples, self._failed, self._open = [], [], 0
        self._round += 1

    def _give_up(self, failed: Sequence[ScoreCall], unfinished: Sequence[Sequence[ScoreCall]], submitted: int) -> None:
        """Raise what ended the wait."""
        self._on_give_up()
        if failed:
            first = failed[0]
            which = f"{first.part.name}: " if first.part.name else ""
            assert first.failure is not None
            ways_on = "" if first.failure.outage else _WAYS_ON
            raise RewardError(f"the reward of {_name(first.sample)} failed: {which}{first.failure.text}{ways_on}")
        raise RewardError(
            f"{len(unfinished)} of {submitted} rewards had not ended at the deadline, the first being that of "
            f"{_name(unfinished[0][0].sample)}"
        )


def _scored(calls: Sequence[ScoreCall]) -> bool:
    return all(call.result is not None for call in calls)


def _joined(calls: Sequence[ScoreCall]) -> RewardResult:
    """The response's result; RewardError where nothing can be trained on its score."""
    result = join([call.part for call in calls], [call.result for call in calls if call.result is not None])
    sample = calls[0].sample
    reward = sample.prompt.reward
    if result.error is not None and reward.on_error == "Fail":
        raise RewardError(f"the reward of {_name(sample)} failed: {result.error}")
    try:
        representable(result.score, "the weighted sum of its parts" if reward.parts else "the score")
    except ValueError as error:
        if reward.on_error == "Score" and result.error is None:
            return RewardResult(reward.error_score, result.parts, str(error))
        raise RewardError(f"the reward of {_name(sample)} failed: {error}") from None
    return result


def _name(sample: RewardSample) -> str:
    return f"prompt {sample.prompt.uid}, sample {sample.index}"


def outcome(call: ScoreCall, score: Score) -> RewardResult | RewardFailure:
    """Outcome of a call; a part may leave a sample to the others."""
    if score.value is not None:
        notes = {} if score.note is None else {call.part.name or "judge": score.note}
        return RewardResult(score.value, score.parts, notes=notes)
    if call.part.name is None:
        return RewardFailure("the reward returned None, which is no score, and there is no other")
    return RewardResult(0.0, absent=True)


def payload(sample: RewardSample, text: str, *, tokens: bool = False) -> dict[str, Any]:
    """Everything about a sample that a process which scores it may be given.

    Args:
        sample: with its prompt and generation.
        text: the response.
        tokens: whether it has the ids of the tokens too, of which there may be many.
    """
    return {
        "prompt": sample.prompt.text,
        "response": text,
        "label": sample.prompt.label,
        "finish_reason": sample.generation.finish_reason,
        "metadata": _metadata(sample),
        "row": sample.prompt.row,
        "raw_label": sample.prompt.row.get(sample.prompt.label_key, sample.prompt.label)
        if sample.prompt.label_key
        else None,
        "messages": sample.prompt.messages,
        "source": sample.prompt.source,
        "response_tokens": len(sample.generation.token_ids),
        "key": f"{sample.prompt.uid if sample.ordinal is None else sample.ordinal}/{sample.index}",
        **(_token_ids(sample) if tokens else {}),
    }


def _token_ids(sample: RewardSample) -> dict[str, list[int]]:
    return {
        "prompt_token_ids": list(sample.prompt.token_ids),
        "token_ids": np.asarray(sample.generation.token_ids).tolist(),
    }


def _metadata(sample: RewardSample) -> Mapping[str, object]:
    """The row's other columns, and of an episode its turns."""
    if not sample.turns:
        return sample.prompt.metadata
    turns = [
        {"action": turn.action, "observation": turn.observation, "reward": turn.reward, "values": dict(turn.values)}
        for turn in sample.turns
    ]
    return {**sample.prompt.metadata, TURNS: turns}
