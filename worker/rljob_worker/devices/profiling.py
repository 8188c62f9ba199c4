"""A profile of some work of this process, by torch's profiler or torch_npu's, into one packed file."""

from __future__ import annotations

import gzip
import importlib
import logging
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch.profiler import ProfilerActivity, profile

from rljob_worker.host.files import replacing

logger = logging.getLogger(__name__)
_COPIED = 1 << 20
_LEVEL = 4


class _Profiler(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ProfileOrder:
    """Work that is to be profiled."""

    file: str
    """Path of the profile, which ends with `.json.gz`."""
    most_bytes: int
    """A file that would be larger is not kept."""
    stacks: bool
    """Whether each operator has the Python lines that called it."""


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """Result of an order."""

    file: str
    bytes: int = 0
    problem: str = ""
    """Why there is no file; empty: there is one."""


class WorkProfiler:
    """Profiles the next piece of work after it was asked to; thread-safe.

    Whatever the profiler does, the work is done: a profile that fails is a result with a problem.

    Args:
        kind: of the device that the work uses: `cpu`, `npu` or `cuda`.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._order: ProfileOrder | None = None
        self._results: list[ProfileResult] = []

    def ask(self, order: ProfileOrder | None) -> None:
        """Profile the next work; None: no more."""
        with self._lock:
            self._order = order

    def results(self) -> list[ProfileResult]:
        """Results of the orders since the last time."""
        with self._lock:
            taken, self._results = self._results, []
            return taken

    @contextmanager
    def work(self) -> Iterator[None]:
        """Do a piece of work."""
        with self._lock:
            order, self._order = self._order, None
        if order is None:
            yield
            return
        with tempfile.TemporaryDirectory(prefix="rljob-profile-", ignore_cleanup_errors=True) as name:
            profiler = self._started(order, Path(name))
            try:
                yield
            finally:
                if profiler is not None:
                    self._written(order, profiler, Path(name))

    def _started(self, order: ProfileOrder, folder: Path) -> _Profiler | None:
        try:
            profiler = _profiler(self._kind, folder, order.stacks)
            profiler.start()
            return profiler
        except Exception as error:
            self._note(ProfileResult(order.file, problem=f"the profiler does not start: {error}"))
            return None

    def _written(self, order: ProfileOrder, profiler: _Profiler, folder: Path) -> None:
        try:
            profiler.stop()
            size = _pack(_trace_in(profiler, folder), Path(order.file), order.most_bytes)
            self._note(ProfileResult(order.file, size))
        except Exception as error:
            self._note(ProfileResult(order.file, problem=str(error) or type(error).__name__))

    def _note(self, result: ProfileResult) -> None:
        if result.problem:
            logger.warning("no profile %s: %s; the run goes on", result.file, result.problem)
        with self._lock:
            self._results.append(result)


def _profiler(kind: str, folder: Path, stacks: bool) -> _Profiler:
    if kind != "npu":
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if kind == "cuda" else [])]
        return profile(activities=activities, with_stack=stacks, acc_events=True)
    npu = importlib.import_module("torch_npu.profiler")
    made: _Profiler = npu.profile(
        activities=[npu.ProfilerActivity.CPU, npu.ProfilerActivity.NPU],
        # Its `with_stack` costs much time; vllm-ascend 0.23 takes the same (profiler/torch_npu_profiler.py).
        with_modules=stacks,
        experimental_config=npu._ExperimentalConfig(
            profiler_level=npu.ProfilerLevel.Level1, export_type=npu.ExportType.Text
        ),
        on_trace_ready=npu.tensorboard_trace_handler(str(folder), analyse_flag=True),
    )
    return made


def _trace_in(profiler: _Profiler, folder: Path) -> Path:
    """The profile as Chrome's trace events."""
    if isinstance(profiler, profile):
        plain = folder / "trace.json"
        profiler.export_chrome_trace(str(plain))
        return plain
    # Written when it stopped: NAME_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json.
    found = next(folder.rglob("trace_view.json"), None)
    if found is None:
        raise RuntimeError("torch_npu's profiler left no trace_view.json; the process's log says why")
    return found


def _pack(plain: Path, file: Path, most_bytes: int) -> int:
    """Pack a file into another one of at most so many bytes; its size."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file, durable=False) as target, plain.open("rb") as source:
        with gzip.GzipFile("", "wb", _LEVEL, target, mtime=0) as packed:
            while (piece := source.read(_COPIED)) and target.tell() <= most_bytes:
                packed.write(piece)
        if target.tell() > most_bytes:
            raise RuntimeError(f"it has more than the {most_bytes} bytes that are left of the limit")
        return target.tell()
