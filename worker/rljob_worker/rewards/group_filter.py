"""Groups left out by a function of the job (`rollout.oversampling.function`), asked in a process of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from rljob_api import RLJobSpec
from rljob_api.spec import RewardSpec
from rljob_worker.confined.process import ConfinedProcess, Place
from rljob_worker.data.sources import data_sources
from rljob_worker.errors import StopRequested, UserError
from rljob_worker.flow import Group
from rljob_worker.rewards.group_filter_process import FilterSetup
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rewards.score_calls import RewardError
from rljob_worker.types import Prompt

_SLICE_SECONDS = 0.05
FIELD = "spec.rollout.oversampling.function"


class GroupFilter:
    """Asks the function, one group at a time.

    Construction imports it in a process that ends at once: UserError says why it cannot be used.

    Args:
        setup: which function, and what it may ask for.
        bounds: of its process: deadlines.
        place: where the process runs.
    """

    def __init__(self, setup: FilterSetup, bounds: RewardSpec, place: Place) -> None:
        self._setup, self._bounds, self._place = setup, bounds, place
        self._process: ConfinedProcess | None = None
        self._number = 0
        self.start()
        self.close()

    def start(self) -> None:
        """Start the process and wait until the function is imported; idempotent.

        Raises:
            UserError: it cannot be used, and why.
        """
        if self._process is not None:
            return
        process = ConfinedProcess(
            "rljob_worker.rewards.group_filter_process",
            self._setup,
            self._place,
            what="filter's process",
            field="reward",
        )
        seconds = self._bounds.import_seconds
        late = f"{self._setup.function!r} has not been imported within reward.importSeconds ({seconds:g} s)"
        try:
            answer = process.read() if process.connection.poll(seconds) else ["refused", f"{FIELD}: {late}"]
        except (EOFError, OSError, ValueError):
            raise UserError(f"{FIELD}: {self._setup.function!r} does not import: {process.end()}") from None
        if answer[0] != "ready":
            process.kill()
            raise UserError(str(answer[-1]))
        self._process = process

    def close(self) -> None:
        """End the process; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def keeps(self, group: Group, prompt: Prompt, stop: threading.Event) -> bool:
        """Whether a group that has its rewards is to be trained on.

        Args:
            group: with its results.
            prompt: its prompt.
            stop: set when the job is to stop.

        Raises:
            RewardError: the function failed, said neither True nor False, or took longer than `reward.timeoutSeconds`.
            StopRequested: the job was asked to stop before the answer came.
        """
        self.start()
        assert self._process is not None
        self._number += 1
        given = {
            **prompt.metadata,
            "rewards": [float(result.score) for result in group.results],
            "prompt": prompt.text,
            "label": prompt.label,
        }
        try:
            self._process.connection.send((self._number, given))
            kind, said = self._answer(self._process, stop)
        except (EOFError, OSError, ValueError):
            kind, said = "error", self._process.end()
            self._process = None
        if stop.is_set():
            # What a stop signal ended did not fail.
            raise StopRequested
        if kind == "keep" and isinstance(said, bool):
            return said
        raise RewardError(f"{FIELD}: {self._setup.function} on the group of prompt {prompt.uid}: {said}")

    def _answer(self, process: ConfinedProcess, stop: threading.Event) -> tuple[str, Any]:
        """Its kind and what it says; EOFError or ValueError when the process has ended or sends something else."""
        deadline = time.monotonic() + self._bounds.timeout_seconds
        while not process.connection.poll(_SLICE_SECONDS):
            if stop.is_set() or time.monotonic() >= deadline:
                self.close()
                return "error", f"no answer within reward.timeoutSeconds ({self._bounds.timeout_seconds:g} s)"
        number, kind, said = process.read()
        if number != self._number:
            raise ValueError(f"an answer to {number!r}")
        return str(kind), said


def group_filter_of(
    spec: RLJobSpec, rewards: RewardRunner, columns: Mapping[str, frozenset[str]]
) -> GroupFilter | None:
    """The job's filter, tried; None where it has no function.

    Args:
        spec: the job.
        rewards: knows where code of users runs.
        columns: by a source's place, those that a reward is given beside prompt and label.

    Raises:
        UserError: the function cannot be used, and why.
    """
    oversampling = spec.rollout.oversampling
    if oversampling is None or oversampling.function is None:
        return None
    own: dict[str, Any] = {"name": None, "parts": None, "by": None, "python": oversampling.function, "args": {}}
    bounds = (spec.reward or RewardSpec(name="exact")).model_copy(update=own)
    known = [columns[field] for field, _ in data_sources(spec) if field in columns]
    setup = FilterSetup(oversampling.function, frozenset.intersection(*known) if known else None)
    return GroupFilter(setup, bounds, rewards.scorers.place(bounds))
