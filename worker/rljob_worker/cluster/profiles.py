"""Profiles of chosen steps and processes: asked for by the manifest or over HTTP, taken between step boundaries."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rljob_api import RLJobSpec, derived
from rljob_api.spec import ProfileSpec
from rljob_worker.cluster.calls import Call, Calls
from rljob_worker.cluster.groups import EngineGroup, TrainerGroup
from rljob_worker.devices.profiling import ProfileOrder, ProfileResult
from rljob_worker.engine.engine import Engine
from rljob_worker.errors import ProcessDiedError, UserError
from rljob_worker.records.event_names import PROFILED
from rljob_worker.records.profile_request import BusyError, ProfileRequest
from rljob_worker.trainer.trainer import Trainer

logger = logging.getLogger(__name__)
FOLDER = "profiles"
_SECONDS = 60.0
_BOUNDARIES = 2
"""After its last step, how many boundaries a request waits for what was begun."""
Results = list[ProfileResult]


@dataclass(slots=True)
class _Running:
    request: ProfileRequest
    left_bytes: int
    awaited: set[str] = field(default_factory=set)
    """Files that were asked for, of which nothing came back yet."""
    files: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


class Profiles:
    """One request at a time.

    Args:
        spec: the job.
        run_folder: the profiles lie in `profiles/step-N` of it.
        trainers: all of them.
        engines: all of them.
        tell: writes an event.

    Raises:
        UserError: `spec.records.profile` names a process that the job does not have.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        run_folder: Path,
        trainers: TrainerGroup,
        engines: EngineGroup,
        tell: Callable[..., None],
    ) -> None:
        self._spec = spec
        self._folder = run_folder / FOLDER
        self._trainers = trainers
        self._engines = engines
        self._tell = tell
        self._lock = threading.Lock()
        self._done = 0
        self._running: _Running | None = None
        if spec.records.profile is not None:
            self.request(_of_spec(spec.records.profile), "spec.records.profile")

    def request(self, request: ProfileRequest, where: str = "profile") -> None:
        """Have steps profiled; thread-safe.

        Args:
            request: what.
            where: it was asked for, for messages.

        Raises:
            BusyError: another request is not done.
            UserError: the job has no such process, or the steps are over.
        """
        for name, numbers, count in (
            ("ranks", request.ranks, derived.trainers(self._spec)),
            ("engines", request.engines, derived.engines(self._spec)),
        ):
            wrong = [number for number in numbers if not 0 <= number < count]
            if wrong:
                raise UserError(f"{where}: {name}: there is no {wrong[0]}; the job has 0 to {count - 1}")
        if not request.ranks and not request.engines:
            raise UserError(f"{where}: names neither ranks nor engines; name one of either at least")
        with self._lock:
            if self._running is not None:
                asked = self._running.request
                raise BusyError(f"a profile of steps {asked.first} to {asked.last} is not done; ask again after it")
            if request.last <= self._done:
                raise UserError(f"{where}: step {request.last} is over; the run is at step {self._done + 1}")
            self._running = _Running(request, request.most_bytes)

    def at_boundary(self, done: int, calls: Calls) -> None:
        """Between two steps: take what was profiled, and have the next step profiled where it was asked for.

        Args:
            done: steps that are done.
            calls: waits for the processes.
        """
        with self._lock:
            self._done, running = done, self._running
        if running is None:
            return
        request = running.request
        try:
            # What was made counts before more is asked for.
            if running.awaited:
                self._ask(running, calls, None)
            if request.first <= done + 1 <= request.last and running.left_bytes > 0:
                self._ask(running, calls, self._folder / f"step-{done + 1}")
        except ProcessDiedError:
            # Whoever needs that process next says so.
            logger.warning("a process that was to be profiled has ended")
            self._end(running)
            return
        given_up = done >= request.last + _BOUNDARIES or running.left_bytes <= 0
        if given_up or (done >= request.last and not running.awaited):
            self._end(running)

    def _ask(self, running: _Running, calls: Calls, folder: Path | None) -> None:
        """Have what comes next profiled into a folder, or no more, and note what became of earlier orders."""
        request = running.request
        share = max(1, running.left_bytes // (len(request.ranks) + len(request.engines)))

        def order(name: str) -> ProfileOrder | None:
            if folder is None:
                return None
            file = str(folder / f"{name}.json.gz")
            running.awaited.add(file)
            return ProfileOrder(file, share, request.stacks)

        asked: list[Call[Results]] = [
            self._trainers[rank].beside(Trainer.profile, order(f"rank-{rank}")) for rank in request.ranks
        ]
        asked += [
            self._engines[number].beside(Engine.profile, order(f"engine-{number}"))
            for number in request.engines
            if number < len(self._engines)
        ]
        # One that has made nothing yet answers with nothing at all.
        answers: Sequence[Results | None] = calls.gather("profile", asked, _SECONDS)
        for result in [one for answer in answers for one in answer or ()]:
            self._note(running, result)

    def _note(self, running: _Running, result: ProfileResult) -> None:
        path = Path(result.file)
        name = str(path.relative_to(self._folder.parent))
        running.awaited = {one for one in running.awaited if not _same(one, path)}
        running.left_bytes -= result.bytes
        if result.problem:
            running.problems[name] = result.problem
        else:
            running.files.append(name)

    def _end(self, running: _Running) -> None:
        missing = {str(Path(one).relative_to(self._folder.parent)): "its process made none" for one in running.awaited}
        request = running.request
        reached = ["the byte limit was reached"] if running.left_bytes <= 0 else []
        problems = {**missing, **running.problems}
        # A resume that has the steps behind it has nothing to tell.
        if running.files or problems:
            files = sorted(running.files)
            self._tell(PROFILED, first=request.first, last=request.last, files=files, problems=problems, notes=reached)
        with self._lock:
            self._running = None


def _same(asked: str, made: Path) -> bool:
    """Whether a file is one that was asked for, or of one of its workers."""
    stem = Path(asked).name.removesuffix(".json.gz")
    return Path(asked).parent == made.parent and made.name.startswith((f"{stem}.", f"{stem}-worker-"))


def _of_spec(spec: ProfileSpec) -> ProfileRequest:
    last = spec.first_step + spec.steps - 1
    return ProfileRequest(
        spec.first_step, last, tuple(spec.ranks), tuple(spec.engines), spec.stacks, spec.max_mebibytes << 20
    )
