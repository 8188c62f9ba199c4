"""The optimizer updates of a step: one model takes all of them or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rljob_api.spec import OptimizerSpec
from rljob_worker.errors import StopRequested
from rljob_worker.trainer.backend import TrainableModel, UpdateResult
from rljob_worker.trainer.batches import Update
from rljob_worker.trainer.learning_rate import learning_rate
from rljob_worker.trainer.objective import Loss
from rljob_worker.trainer.snapshots import Snapshot


@dataclass(frozen=True, slots=True)
class Applied:
    """Updates of a step up to one that failed."""

    results: list[UpdateResult]
    rate: float
    """Learning rate of the last."""

    @property
    def fault(self) -> str | None:
        """Why the model is as before the step; None where it has all updates."""
        return self.results[-1].fault


class StepUpdates:
    """Updates of one rank of a model, step by step; collective.

    Args:
        model: that is updated.
        optimizer: its settings, for the learning rate.
        total: optimizer updates in the whole job.

    Attributes:
        done: optimizer updates that the model has had so far.
    """

    def __init__(self, model: TrainableModel, optimizer: OptimizerSpec, total: int) -> None:
        self._model, self._optimizer, self._total = model, optimizer, total
        self.done = 0
        self._snapshot: Snapshot | None = None
        self._before: int | None = None
        """Updates before the step that `undo` goes back to; None: to none."""

    def run(self, updates: Sequence[Update], losses: Sequence[Loss], *, undoable: bool = False) -> Applied:
        """Make a step's updates, or none of them where one fails.

        Args:
            updates: at least one.
            losses: of each.
            undoable: the whole step can be undone until it is settled.

        Raises:
            StopRequested: on all ranks; the model is as before the step.
        """
        self._before = None
        if undoable or len(updates) > 1:
            self._snapshot = self._snapshot or Snapshot([*self._model.trained, *self._model.optimizer_state])
            self._snapshot.take()
            self._before = self.done
        applied = self._run(updates, losses)
        if applied.fault is not None:
            self.undo()
        if not undoable:
            self.settle()
        return applied

    def settle(self) -> None:
        """Keep the updates of the step."""
        self._before = None

    def undo(self) -> None:
        """Go back to before the step, bit for bit; nothing where it is settled, or could only fail as a whole."""
        if self._before is not None:
            assert self._snapshot is not None
            self._snapshot.restore()
            self.done, self._before = self._before, None

    def _run(self, updates: Sequence[Update], losses: Sequence[Loss]) -> Applied:
        results: list[UpdateResult] = []
        rate = 0.0
        try:
            for update, loss in zip(updates, losses, strict=True):
                rate = learning_rate(self.done, self._optimizer, self._total)
                results.append(self._model.update(update, loss, rate))
                if results[-1].fault is not None:
                    break
                self.done += 1
        except StopRequested:
            self.undo()
            raise
        return Applied(results, rate)
