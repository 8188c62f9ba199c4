"""One process of a role on Ray: it makes the object that its role names, and runs that object's methods."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast
from weakref import WeakValueDictionary

import ray

from rljob_worker.errors import JobError, StopRequested, UserError
from rljob_worker.host.files import keep_output_from_raising

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """A call's result, with the seconds that its process has computed so far."""

    value: T
    busy_seconds: float
    began: float = field(default=0.0, compare=False)
    ended: float = field(default=0.0, compare=False)
    """Unix seconds of the call by its process's clock; of a stream, until this item. 0: not part of a step's work."""


@dataclass(frozen=True, slots=True)
class Location:
    """Location of a process."""

    pid: int
    node: str
    """Ray's id of it."""


@dataclass(frozen=True, slots=True)
class _Shared:
    ref: ray.ObjectRef[object]


def share(value: T) -> T:
    """Put a value into Ray's object store, for calls of many processes.

    A process reads it once for as long as its object keeps it. Its type must allow weak references.

    Args:
        value: what the calls take.

    Returns:
        What is passed in its place to `Process.call`; it has no attributes here.
    """
    return cast(T, _Shared(ray.put(value)))


def prepare_process(log_file: str, stacks_file: str) -> int:
    """Send this process's output to its log and make SIGUSR2 write all its threads' stacks; returns the pid."""
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    keep_output_from_raising()
    stacks = open(stacks_file, "a")  # noqa: SIM115  (faulthandler keeps the descriptor for the process's life)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    faulthandler.enable()
    return os.getpid()


@contextmanager
def _logged() -> Iterator[None]:
    """Write the traceback of an error that this code did not foresee into the process's log: the driver has its last
    line alone."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, JobError | StopRequested | UserError):
            traceback.print_exc()
        raise


class Actor:
    """Runs the methods of one object, one call at a time, and thread-safe ones beside them.

    Args:
        log_file: this process's output.
        stacks_file: its threads' stacks on SIGUSR2.
        api: class of the object, as `module:name`; empty: a process that has none.
        arguments: of the object.
        hidden: variables that it was not started with, since those are visible to all that may look at processes.
    """

    def __init__(
        self, log_file: str, stacks_file: str, api: str, arguments: Mapping[str, object], hidden: Mapping[str, str]
    ) -> None:
        for name, value in hidden.items():
            os.environ.setdefault(name, value)
        self._pid = prepare_process(log_file, stacks_file)
        module, _, kind = api.partition(":")
        # Imported beside whatever else starts; made by the first call, which can say what is wrong with the arguments.
        self._kind = getattr(importlib.import_module(module), kind) if api else None
        self._arguments = arguments
        self._object: Any = None
        self._shared: WeakValueDictionary[str, object] = WeakValueDictionary()

    def location(self) -> Reply[Location]:
        """This process's pid and node."""
        return Reply(Location(self._pid, str(ray.get_runtime_context().get_node_id())), 0.0)

    def variable(self, name: str) -> Reply[str]:
        """A variable of this process's environment; empty where it is not set."""
        return Reply(os.environ.get(name, ""), 0.0)

    def call(self, method: str, /, *args: object, **kwargs: object) -> Reply[object]:
        """Run a method."""
        began = time.time()
        with _logged():
            return self._reply(self._run(method, args, kwargs), began)

    def stream(self, method: str, /, *args: object, **kwargs: object) -> Iterator[Reply[object]]:
        """Run a method that is a generator."""
        began = time.time()
        with _logged():
            # No delegation: Ray sends values into the generator.
            for item in self._run(method, args, kwargs):
                yield self._reply(item, began)

    def beside(self, method: str, /, *args: object, **kwargs: object) -> Reply[object]:
        """Run a thread-safe method beside whatever is running; nothing before the first call."""
        if self._object is None:
            return Reply(None, 0.0)
        return Reply(getattr(self._object, method)(*args, **kwargs), self._object.busy_seconds())

    def _run(self, method: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        if self._object is None:
            assert self._kind is not None, "a process without an object"
            self._object = self._kind(**self._arguments)
        return getattr(self._object, method)(*map(self._read, args), **kwargs)

    def _read(self, value: object) -> object:
        if not isinstance(value, _Shared):
            return value
        key = value.ref.hex()
        if (found := self._shared.get(key)) is None:
            found = self._shared[key] = ray.get(value.ref)
        return found

    def _reply(self, value: T, began: float) -> Reply[T]:
        return Reply(value, self._object.busy_seconds(), began, time.time())
