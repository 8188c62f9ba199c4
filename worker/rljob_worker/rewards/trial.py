"""Rewards tried on responses that are there already: every one is scored, and failures are counted."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rljob_api.spec import RewardSpec, RLJobSpec
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rewards.score_calls import RewardSample
from rljob_worker.rewards.weighted_parts import parts_of
from rljob_worker.types import RewardResult

_CHUNK = 256
"""Responses that are submitted at once."""
_PATIENCE_SECONDS = 0.5
_STARTING_SECONDS = 600.0
"""More than a scoring process may take to start; each call that is ended may cost one."""
_VALUES = 10
"""Different scores that are counted one by one; more are counted by ranges."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A response that is to be scored."""

    sample: RewardSample
    place: str
    """File and row."""
    recorded: float | None = None
    """Score that it got in a run."""


@dataclass(frozen=True, slots=True)
class Count:
    """Scores from `low` to `high`, which are the same where one value is counted."""

    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """Numbers as people look at them."""

    count: int
    mean: float
    deviation: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """That of at least one value."""
        mean = math.fsum(values) / len(values)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
        return cls(len(values), mean, deviation, min(values), max(values))


@dataclass(slots=True)
class Tally:
    """Results of one set of responses."""

    scores: list[float] = field(default_factory=list)
    """Scores of those whose reward did not fail."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    errors: list[tuple[str, str]] = field(default_factory=list)
    """(place, what the reward said)."""
    compared: int = 0
    """Scores that a run recorded, too."""
    other: list[tuple[str, float, float]] = field(default_factory=list)
    """(place, score in the run, score now), where they differ."""
    seconds: float = 0.0

    def add(self, candidate: Candidate, result: RewardResult) -> None:
        """Count one result."""
        if result.error is not None:
            self.errors.append((candidate.place, result.error))
            return
        self.scores.append(result.score)
        for name, value in result.parts.items():
            self.parts.setdefault(name, []).append(value)
        if candidate.recorded is not None:
            self.compared += 1
            if not math.isclose(candidate.recorded, result.score, rel_tol=1e-6, abs_tol=1e-9):
                self.other.append((candidate.place, candidate.recorded, result.score))

    def counts(self) -> list[Count]:
        """Count of each score, or of each tenth of their range where there are many."""
        return counts(self.scores)


def counts(values: Sequence[float]) -> list[Count]:
    """Count of each value, or of each tenth of their range where there are many; the last range has its end."""
    by_value = Counter(values)
    if len(by_value) <= _VALUES:
        return [Count(value, value, by_value[value]) for value in sorted(by_value)]
    low, high = min(values), max(values)
    # Divided first: the difference of two finite numbers need not be one.
    width = high / _VALUES - low / _VALUES
    in_range = Counter(min(_VALUES - 1, int((value / width) - (low / width))) for value in values)
    edges = [*(low + width * index for index in range(_VALUES)), high]
    return [Count(edges[index], edges[index + 1], in_range[index]) for index in range(_VALUES)]


def never_failing(spec: RLJobSpec) -> RLJobSpec:
    """The job with rewards whose failure is a result: all of them are to be seen, not the first alone."""

    def counted(reward: RewardSpec | None) -> RewardSpec | None:
        return None if reward is None else reward.model_copy(update={"on_error": "Score"})

    def each(source: Any) -> Any:
        return source.model_copy(update={"reward": counted(source.reward)})

    data, evaluation = each(spec.data), spec.evaluation
    data = data.model_copy(update={"sources": [each(source) for source in data.sources]})
    if evaluation is not None:
        held_out = None if evaluation.data is None else each(evaluation.data)
        sets = None if evaluation.sets is None else [each(source) for source in evaluation.sets]
        evaluation = evaluation.model_copy(update={"data": held_out, "sets": sets})
    return spec.model_copy(update={"reward": counted(spec.reward), "data": data, "evaluation": evaluation})


def score_all(runner: RewardRunner, candidates: Iterable[Candidate], on_scored: Callable[[int], None]) -> Tally:
    """Score responses; those of one group stand one after the other, and are one call of a batch reward.

    Args:
        runner: with rewards of `never_failing`.
        candidates: read as they are needed.
        on_scored: gets the number of further scored ones.
    """
    tally, begun = Tally(), time.monotonic()
    for chunk in _chunks(candidates):
        numbered = [_numbered(candidate, number) for number, candidate in enumerate(chunk)]
        results: dict[int, RewardResult] = {}
        runner.submit([candidate.sample for candidate in numbered])
        allowed = _longest_seconds(chunk)
        while len(results) < len(chunk):
            taken = runner.take(_PATIENCE_SECONDS, allowed)
            results |= {sample.ordinal: result for sample, result in taken if sample.ordinal is not None}
            on_scored(len(taken))
        for number, candidate in enumerate(chunk):
            tally.add(candidate, results[number])
    tally.seconds = time.monotonic() - begun
    return tally


def _chunks(candidates: Iterable[Candidate]) -> Iterator[list[Candidate]]:
    chunk: list[Candidate] = []
    for _, group in groupby(candidates, key=lambda candidate: (candidate.sample.ordinal, candidate.sample.prompt.uid)):
        chunk += group
        if len(chunk) >= _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _numbered(candidate: Candidate, number: int) -> Candidate:
    sample = candidate.sample
    own = RewardSample(sample.prompt, sample.index, sample.generation, sample.text, number)
    return Candidate(own, candidate.place, candidate.recorded)


def _longest_seconds(chunk: Sequence[Candidate]) -> float:
    """Seconds after which the scoring processes have surely answered, since each call has a time-out of its own."""
    rewards = [candidate.sample.prompt.reward for candidate in chunk]
    return sum((reward.timeout_seconds + _STARTING_SECONDS) * len(parts_of(reward)) for reward in rewards)
