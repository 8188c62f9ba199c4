"""Forks drivers, trainers and engines: `server.py SOCKET` is started once by a pytest process and ends with it.

Processes that `make test` runs side by side share the server of the one that started them.

The first process imports nothing. For each role and each set of variables that libraries read while they are loaded,
it starts one more of this script, which imports what the role needs and hands over to forks of itself: `server.py
SOCKET ROLE`, with the channel to the first as standard input.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import census
from ends import end
from protocol import (
    CENSUS,
    DRIVER,
    ENGINE,
    FAULT,
    KEY,
    NICENESS,
    NPU,
    OPERATOR,
    PLAIN,
    PRELOADED,
    TRAINER,
    Request,
    receive,
    send,
)
from ray_nodes import workers_are_forked
from spawned import spawned_are_forked

CONNECTION = -1
"""A worker is handed on with its files, and its connection after them."""
ABOVE = 256
"""No file that a process is to get has a number from here on."""
MOST = 10
"""Processes that import something: each takes some 300 MB."""
RAYS_OWN = ["google.protobuf.message", "jsonschema", "opentelemetry.trace", "pydantic.v1", "requests"]
"""Imports of Ray in a worker; Ray itself has to be loaded in the fork."""
RAYS_START = ["ray.dashboard.optional_deps", "ray.dag", "ray._common.usage.usage_lib", "pydantic.v1"]
"""Imports of Ray while it starts a node."""
IMPORTS = {
    DRIVER: [
        "rljob_worker.cli.main",
        "rljob_worker.driver.run",
        "rljob_worker.cli.progress",
        "rljob_worker.report.build",
        "rljob_worker.report.table",
        "torch.utils.tensorboard",
        "transformers.models.auto.tokenization_auto",
        "datasets",
        *RAYS_START,
    ],
    TRAINER: [
        "rljob_worker.trainer.trainer",
        "rljob_worker.trainer.megatron.backend",
        "rljob_worker.trainer.megatron.rank_state",
        "rljob_worker.trainer.megatron.models.build",
        "rljob_worker.trainer.megatron.optimizer",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.optimizer",
        "transformers.models.auto.configuration_auto",
        *RAYS_OWN,
    ],
    ENGINE: [
        "rljob_worker.engine.engine",
        "rljob_worker.engine.sleep_controller",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.qwen3",
        "transformers.models.auto.tokenization_auto",
        *RAYS_OWN,
    ],
    NPU: [
        "torch_npu",
        "pytest",
        "rljob_worker.devices.npu",
        "rljob_worker.memory.saver_checks",
        "rljob_worker.weightsync.trainer",
    ],
    OPERATOR: ["rljob_operator.main"],
    PLAIN: [],
}


Task = Callable[[], object]


def main(path: str, role: str = "") -> Task | None:
    """Serve until the pytest process ends; in a fork, what it is to do."""
    if role:
        if role == ENGINE:
            # vLLM imports Ray where it is there, and that reads a worker's job and raylet from its variables once: a
            # fork would have none and abort. Our engines use no executor of Ray.
            sys.modules["ray"] = None  # type: ignore[assignment]
        for module in IMPORTS[role]:
            importlib.import_module(module)
        if role == ENGINE:
            del sys.modules["ray"]
        gc.collect()
        gc.freeze()
        return _Forks(socket.socket(fileno=os.dup(0))).serve()
    _Server(path).serve()
    return None


class _Server:
    """Hands each request to a process of its key."""

    def __init__(self, path: str) -> None:
        self._path = path
        # In PYTHONPATH too they would be taken for what one request named, and the next would have no standard library.
        program = [sys.executable, "-E", "-c", "import sys; print(*sys.path, sep=chr(10))"]
        self._everywhere = set(subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines())
        self._processes: dict[str, socket.socket] = {}
        """Channels, those that were used last at the end."""

    def serve(self) -> None:
        """Until standard input ends, which the pytest process holds."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self._path)
        listener.listen(64)
        os.write(1, b".")
        selector = selectors.DefaultSelector()
        selector.register(0, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    return
                connection, _ = listener.accept()
                with connection, suppress(EOFError, OSError):
                    request, files = receive(connection)
                    send(self._of(request), request, [*files, connection.fileno()])
                    for file in files:
                        os.close(file)

    def _of(self, request: Request) -> socket.socket:
        channel = self._processes.pop(request.key, None)
        if channel is None:
            if len(self._processes) == MOST:
                # It ends with the last of its forks.
                self._processes.pop(next(iter(self._processes))).close()
            channel = self._start(request)
        self._processes[request.key] = channel
        return channel

    def _start(self, request: Request) -> socket.socket:
        ours, theirs = socket.socketpair()
        named = request.environment.get("PYTHONPATH", "").split(os.pathsep)
        path = os.pathsep.join(entry for entry in named if not self._has(entry))
        with theirs:
            subprocess.Popen(
                [sys.executable, __file__, self._path, request.role],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                env=request.kept | {"PATH": request.environment.get("PATH", ""), "PYTHONPATH": path},
                cwd="/",
            )
        return ours

    def _has(self, entry: str) -> bool:
        """Whether each process has it without PYTHONPATH, or below it: old modules lie in a folder of setuptools, which
        a test's path has behind all others."""
        return entry in self._everywhere or any(str(above) in self._everywhere for above in Path(entry).parents)


class _Forks:
    """Forks this process for each request, and says how each fork ended."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._open = True
        self._children: dict[int, socket.socket] = {}

    def serve(self) -> Task | None:
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writing)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ, "request")
        self._selector.register(reading, selectors.EVENT_READ, "ended")
        while self._open or self._children:
            for key, _ in self._selector.select():
                if key.data == "request":
                    try:
                        request, files = receive(self._channel)
                    except (EOFError, OSError):
                        self._selector.unregister(self._channel)
                        self._open = False
                        continue
                    child = os.fork()
                    if child == 0:
                        signal.set_wakeup_fd(-1)
                        os.close(reading)
                        os.close(writing)
                        self._leave_to_the_parent(files)
                        return lambda request=request, files=files: _become(request, files[:CONNECTION])
                    self._keep(child, files)
                elif key.data == "ended":
                    with suppress(BlockingIOError):
                        os.read(reading, 4096)
                    self._reap()
                else:
                    # Whoever asked for it is gone, or was killed in its place.
                    self._selector.unregister(key.fileobj)
                    with suppress(ProcessLookupError):
                        os.kill(key.data, signal.SIGKILL)
        return None

    def _keep(self, child: int, files: list[int]) -> None:
        for file in files[:CONNECTION]:
            os.close(file)
        connection = socket.socket(fileno=files[CONNECTION])
        self._children[child] = connection
        self._selector.register(connection, selectors.EVENT_READ, child)
        with suppress(OSError):
            connection.sendall(f"{child}\n".encode())

    def _reap(self) -> None:
        for child in list(self._children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if not pid:
                continue
            connection = self._children.pop(child)
            with suppress(KeyError):
                self._selector.unregister(connection)
            with connection, suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())

    def _leave_to_the_parent(self, files: list[int]) -> None:
        self._selector.close()
        self._channel.close()
        for connection in self._children.values():
            connection.close()
        os.close(files[CONNECTION])


def _become(request: Request, files: list[int]) -> object:
    """Be what was asked for; where its main module ends, this process does."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Where one is to be, another may lie.
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for file in files]
    for file in files:
        os.close(file)
    for target, file in zip((0, 1, 2, *request.passed), apart, strict=True):
        os.dup2(file, target)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    at_start = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update({**request.environment, KEY: request.key})
    os.setpriority(os.PRIO_PROCESS, 0, int(request.environment[NICENESS]))
    os.chdir(request.folder)
    tempfile.tempdir = None
    script, *arguments = request.argv
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = str(Path(__file__).parent)
    rest = [entry for entry in sys.path if entry not in {*at_start, own}]
    beside = request.folder if script in ("-m", "-c") else str(Path(script).parent)
    sys.path[:] = [*dict.fromkeys([beside, *(entry for entry in named if entry), *rest])]
    importlib.invalidate_caches()
    if request.role == DRIVER:
        _read_rays_variables()
        workers_are_forked()
    if request.role == ENGINE:
        spawned_are_forked()
    if {FAULT, PRELOADED} <= os.environ.keys():
        ctypes.CDLL(None).fault_from_environment()
    if folder := os.environ.get(CENSUS):
        census.watch(request.role, Path(folder))
    if script == "-c":
        sys.argv = ["-c", *arguments[1:]]
        return exec(arguments[0], {"__name__": "__main__"})
    if script != "-m":
        sys.argv = [script, *arguments]
        return runpy.run_path(script, run_name="__main__")
    module = importlib.import_module(arguments[0])
    assert module.__file__ is not None
    sys.argv = [module.__file__, *arguments[1:]]
    sys.exit(module.main())


def _read_rays_variables() -> None:
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


if __name__ == "__main__":
    task = main(*sys.argv[1:])
    if task is not None:
        end(task)
