"""Scores responses while others are still being generated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rljob_worker.data.tokenizer import decode_responses
from rljob_worker.models.judge_model import Said
from rljob_worker.rewards.busy_clock import BusyClock
from rljob_worker.rewards.functions import RewardFailure, Sample, Score
from rljob_worker.rewards.inline import Inline
from rljob_worker.rewards.judge_texts import TRIES, seed_of
from rljob_worker.rewards.model_judge import ModelJudge, Questions
from rljob_worker.rewards.score_calls import RewardSample, ScoreCall, ScoreCalls, outcome, payload
from rljob_worker.rewards.scorers import Isolated, Scorers
from rljob_worker.types import RewardResult


class RewardRunner:
    """Runs the rewards of a job's sources.

    Built-in rewards that take linear time are scored at once in the caller's thread. `regex`, `math` and Python
    functions run in processes of their own, so that a hung one can be killed: sync functions one call at a time in each
    of up to `processes`, async ones up to 256 at once in one. The working directory is on `sys.path` for them.

    No code of a user runs in the driver. Use as a context manager, or `close()`. One thread submits and one collects;
    they may be two.

    Args:
        scorers: score the parts of the rewards; of a judge whose model the job runs, `questions` has what it is asked.
    """

    def __init__(self, scorers: Scorers) -> None:
        self.scorers = scorers
        self._asked: list[_Question] = []
        self._calls = ScoreCalls(self._forget_queued)
        self._clock = BusyClock()

    def start(self) -> None:
        """Start the scoring processes ahead of the first `submit`."""
        for scorer in self.scorers.isolated():
            scorer.pool.start()

    def submit(self, samples: Sequence[RewardSample]) -> None:
        """Begin to score, without waiting. Samples of one prompt that share a batch reward are one call: submit a
        prompt's group whole."""
        now = time.monotonic()
        parts = [
            [ScoreCall(sample, part, now) for part, _ in self.scorers.of(sample.prompt.reward)] for sample in samples
        ]
        self._calls.begin(parts)
        with self._clock:
            for _, group in groupby(parts, key=lambda calls: id(calls[0].sample.prompt.reward)):
                calls = list(group)
                for index, (_, scorer) in enumerate(self.scorers.of(calls[0][0].sample.prompt.reward)):
                    members = [of_sample[index] for of_sample in calls]
                    if isinstance(scorer, Inline):
                        self._score_inline(scorer, members)
                    elif isinstance(scorer, ModelJudge):
                        self._ask(scorer, members)
                    else:
                        self._score_isolated(scorer, members)

    def take_all(self, deadline: float) -> list[tuple[RewardSample, RewardResult]]:
        """The results of all samples that were submitted and not taken, each with its sample, in that order.

        Waits until `deadline` (`time.monotonic()`) at most. Raises RewardError when a reward failed under
        `onError: Fail` (at once, without waiting for the others) or when the deadline passed; it names the sample,
        and what was submitted is forgotten.
        """
        return self._calls.take_all(deadline)

    def take(self, patience: float, seconds: float) -> list[tuple[RewardSample, RewardResult]]:
        """The results that have come since the last time, each with its sample, in the order of their submission.

        Args:
            patience: seconds to wait for one where none has come; none may come in that time.
            seconds: that a reward may take from its submission on.

        Raises:
            RewardError: as `take_all`.
        """
        return self._calls.take(patience, seconds)

    @property
    def outstanding(self) -> int:
        """Calls that were begun and have not ended; those of which `take_all` or `take` raised do not count."""
        return self._calls.outstanding

    def score(self, samples: Sequence[RewardSample], deadline: float) -> list[RewardResult]:
        """`submit`, then `take_all`: the results in the order of the samples."""
        self.submit(samples)
        return [result for _, result in self.take_all(deadline)]

    def questions(self) -> Questions | None:
        """Texts for the judge's model of all that was submitted, in the order of prompts and samples; None:
        nothing. Called by the thread that submits; nothing is asked twice."""
        asked, self._asked = sorted(self._asked, key=lambda one: one.place), []
        return self._questions(asked, 0)

    def _questions(self, asked: Sequence[_Question], count: int) -> Questions | None:
        """These, of which the judge was asked so many times before."""
        judge, round_ = self.scorers.judge, self._calls.round
        if judge is None or not asked:
            return None

        def answer(answers: Sequence[float | Said]) -> Questions | None:
            found = [judge.verdict(said, last=count + 1 == TRIES) for said in answers]
            pairs = list(zip(asked, found, strict=True))
            self._calls.end(
                [
                    (one.call, outcome(one.call, score) if isinstance(score, Score) else score)
                    for one, score in pairs
                    if score is not None
                ],
                round_,
            )
            return self._questions([one for one, score in pairs if score is None], count + 1)

        seeds = [seed_of(self.scorers.seed, judge.spec.name, one.key, count) for one in asked]
        return Questions([one.tokens for one in asked], seeds, judge.writes, answer)

    def take_busy_seconds(self) -> float:
        """Wall-clock seconds, since the last call, during which at least one sample was being scored."""
        return self._clock.take()

    def close(self) -> None:
        """End the scoring processes."""
        for scorer in self.scorers.isolated():
            scorer.pool.close()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _score_inline(self, scorer: Inline, calls: list[ScoreCall]) -> None:
        texts = self._texts(calls) if scorer.needs_text else [""] * len(calls)
        outcomes: list[tuple[ScoreCall, RewardResult | RewardFailure]] = []
        for call, text in zip(calls, texts):
            try:
                outcomes.append((call, RewardResult(*scorer.score(call.sample, text))))
            except Exception as error:
                outcomes.append((call, RewardFailure(f"{type(error).__name__}: {error}")))
        self._calls.end(outcomes, self._calls.round)

    def _ask(self, judge: ModelJudge, calls: list[ScoreCall]) -> None:
        failed: list[tuple[ScoreCall, RewardResult | RewardFailure]] = []
        for call, text in zip(calls, self._texts(calls)):
            try:
                sent = payload(call.sample, text)
                self._asked.append(_Question(call, judge.tokens(sent), sent["key"]))
            except ValueError as error:
                failed.append((call, judge.lacks(str(error))))
        self._calls.end(failed, self._calls.round)

    def _score_isolated(self, scorer: Isolated, calls: list[ScoreCall]) -> None:
        texts = self._texts(calls)
        pairs = list(zip(calls, texts))
        tasks: Iterable[list[tuple[ScoreCall, str]]] = ([pair] for pair in pairs)
        if scorer.batch:
            tasks = (list(group) for _, group in groupby(pairs, key=lambda pair: pair[0].sample.prompt.uid))
        for task in tasks:
            self._clock.enter()
            samples: list[Sample] = [payload(call.sample, text, tokens=scorer.tokens) for call, text in task]
            scorer.pool.submit(samples, self._receiver([call for call, _ in task]))

    def _receiver(self, calls: list[ScoreCall]) -> Callable[[list[Score] | RewardFailure], None]:
        round_ = self._calls.round

        def done(scores: list[Score] | RewardFailure) -> None:
            self._clock.exit()
            if isinstance(scores, RewardFailure):
                self._calls.end([(call, scores) for call in calls], round_)
            else:
                self._calls.end([(call, outcome(call, score)) for call, score in zip(calls, scores)], round_)

        return done

    def _texts(self, calls: list[ScoreCall]) -> list[str]:
        known = [call.sample.text for call in calls]
        if None in known:
            return decode_responses(self.scorers.tokenizer, [call.sample.generation for call in calls])
        return [text for text in known if text is not None]

    def _forget_queued(self) -> None:
        self._asked = []
        for scorer in self.scorers.isolated():
            for _ in range(scorer.pool.cancel_queued()):
                self._clock.exit()


@dataclass(frozen=True, slots=True)
class _Question:
    call: ScoreCall
    tokens: list[int]
    key: str
    """Name of the sample, for the seed of an answer."""

    @property
    def place(self) -> tuple[int, int, str]:
        """By prompt, sample and part: in whatever order groups were complete, a judge sees them in this one."""
        sample = self.call.sample
        return -1 if sample.ordinal is None else sample.ordinal, sample.index, self.call.part.place
