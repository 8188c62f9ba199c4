"""Evaluation alone: the held-out prompts under the weights that the engines started with."""

from __future__ import annotations

from rljob_api.how_many import how_many
from rljob_api.spec import RecordsSpec
from rljob_worker.driver.handover import Handover
from rljob_worker.driver.job import Job, Surroundings
from rljob_worker.errors import JobError
from rljob_worker.host.files import WriteFailures
from rljob_worker.records.token_files import write_tokens
from rljob_worker.records.trajectories import write_evaluated
from rljob_worker.rollouts.evaluation import Answered, evaluation_metrics
from rljob_worker.rollouts.kept_tokens import choose, tokens_of
from rljob_worker.rollouts.rows import response_row

_EVALUATED = "evaluated"


class EvaluationLoop(Job[Handover]):
    """One lane, without trainers: what is evaluated is recorded as step 0, with a row for each response."""

    def __init__(self, given: Surroundings) -> None:
        super().__init__(given, Handover)
        self._count = 0

    def start(self) -> int:
        """Nothing is restored or handed over: the engines have their weights."""
        return 0

    def train(self) -> None:
        """Evaluate, and train nothing; StopRequested when the job was asked to stop before it was done."""
        self.evaluate_at_start()

    def end(self) -> str:
        """Nothing: an evaluation leaves no checkpoint."""
        return ""

    def goal(self) -> str:
        """Work of the job once it is ready, for people."""
        return f"evaluating {how_many(len(self._inputs.evaluation_prompts), 'prompt')}"

    def done(self) -> str:
        """Work that the job did, for people."""
        return f"{how_many(self._count, 'response')} evaluated"

    def stopped(self) -> str:
        """Save nothing."""
        return "nothing of the evaluation is kept"

    def _held_out(self) -> dict[str, float]:
        assert self.spec.evaluation is not None
        answered = self.rollouts.answered()
        self._write(answered)
        return evaluation_metrics(answered, self.spec.evaluation)

    def _write(self, answered: list[Answered]) -> None:
        """Write all rows; JobError where they cannot be, for they are what was asked for."""
        version = self.progress.weight_version
        rows = [
            response_row(one.prompt, one.group, index, decision=_EVALUATED, weight_version=version)
            | {"source": one.prompt.source}
            for one in answered
            for index in range(len(one.group.results))
        ]
        failures = WriteFailures()
        if write_evaluated(self._records.folder, rows, failures) is None:
            raise JobError(f"the responses cannot be written: {failures.last('trajectories')}")
        kept = choose([one.group for one in answered], RecordsSpec(), 0)
        write_tokens(self._records.folder, 0, tokens_of(kept, self._inputs.tokenizer), self._failures)
        self._count = len(rows)
