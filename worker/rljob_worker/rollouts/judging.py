"""The turn of a judge's model, between generation and training, on the devices of the others or its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from rljob_worker.cluster.groups import JudgeGroup
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.engine.judge import JudgeEngine
from rljob_worker.engine.reports import EngineSlept, EngineWoke
from rljob_worker.models.judge_model import Said
from rljob_worker.records.writer import RecordWriter
from rljob_worker.rewards.model_judge import Questions
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rollouts.policies.whole import contiguous


class Judging:
    """Has a judge score what generation left for it; wakes it before and puts it to sleep, where devices are shared.

    Args:
        judges: its processes; none: no judge has a model.
        calls: waits for them.
        rewards: have what is to be scored.
        records: where is noted what its turns did to memory.
    """

    def __init__(self, judges: JudgeGroup, calls: PhaseCalls, rewards: RewardRunner, records: RecordWriter) -> None:
        self._judges, self._calls, self._rewards, self._records = judges, calls, rewards, records
        self._questions: Questions | None = None

    def due(self) -> bool:
        """Whether there is something to score."""
        if self._questions is None and len(self._judges):
            self._questions = self._rewards.questions()
        return self._questions is not None

    def wake(self) -> None:
        """The judge takes its memory back."""
        self._note(self._calls.gather("judge_wake", self._judges.call(JudgeEngine.wake)))

    def score(self) -> None:
        """Each process judges a range of the texts, once more where it said no verdict; the rewards have them then.

        Raises:
            StopRequested: the job was asked to stop.
        """
        while (asked := self._questions) is not None:
            self._questions = asked.answer(self._said(asked))

    def _said(self, asked: Questions) -> list[float | Said]:
        ranges = contiguous(range(len(asked.texts)), len(self._judges))
        shares = [([asked.texts[one] for one in places], [asked.seeds[one] for one in places]) for places in ranges]
        each = list(zip(self._judges, shares, strict=True))
        if asked.writes:
            written = [process.call(JudgeEngine.write, *share) for process, share in each]
            return list(chain.from_iterable(self._calls.gather("judge", written, stoppable=True)))
        scored = [process.call(JudgeEngine.score, texts) for process, (texts, _) in each]
        return list(chain.from_iterable(self._calls.gather("judge", scored, stoppable=True)))

    def sleep(self) -> None:
        """The judge gives its memory back."""
        self._note(self._calls.gather("judge_sleep", self._judges.call(JudgeEngine.sleep)))

    def _note(self, reports: Sequence[EngineSlept | EngineWoke]) -> None:
        phase = self._calls.phase("judge")
        self._records.memory(
            phase, {one.name: report.as_record() for one, report in zip(self._judges, reports, strict=True)}
        )
