"""An Engine in a process of its own with the environment that a job gives it, and calls to it over a pipe."""

from __future__ import annotations

import operator
import pickle
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.warm.client import WarmProcess
from support.warm.protocol import ENGINE
from support.warm.scripts import variables_of

from rljob_api import RLJobSpec

CALL_SECONDS = 400.0


class RemoteEngine:
    """Forwards calls to the engine process; the process's output goes to `log`.

    Args:
        spec: of the job.
        model: folder with its model.
        log: the process's output.
        index: number of the engine.
        sync_folder: where trainers hand weights over.
        cold: start a new interpreter, and so vLLM's workers; else they are forked.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        model: Path,
        log: Path,
        *,
        index: int = 0,
        sync_folder: Path | None = None,
        cold: bool = False,
    ) -> None:
        from multiprocessing import Pipe

        from rljob_worker.weightsync.routes import HostRoute

        tensor_parallel = spec["rollout"]["tensorParallel"]
        arguments = dict(
            spec=spec,
            index=index,
            model_folder=str(model),
            devices=[f"host:cpu:{index * tensor_parallel + rank}" for rank in range(tensor_parallel)],
            folder=None if sync_folder is None else str(sync_folder),
            route=None if sync_folder is None else HostRoute(str(sync_folder)),
        )
        self.log = log
        self._connection, theirs = Pipe()
        environment = variables_of(ENGINE, RLJobSpec.model_validate(spec))
        number = theirs.fileno()
        self.process: WarmProcess | subprocess.Popen[bytes]
        if cold:
            with open(log, "wb") as output:
                command = [sys.executable, __file__, str(number)]
                self.process = subprocess.Popen(
                    command, pass_fds=[number], env=environment, stdout=output, stderr=subprocess.STDOUT
                )
        else:
            self.process = WarmProcess(ENGINE, [__file__, str(number)], environment, output=log, passed=[number])
        theirs.close()
        self.send("__init__", **arguments)

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Start a call of a method, or of an attribute's; `wait` gets its result.

        `abort`, `weight_version` and `requests` are answered while another call runs.
        """
        self._connection.send_bytes(pickle.dumps((method, args, kwargs)))

    def wait(self, seconds: float = CALL_SECONDS) -> Any:
        """Result of the next finished call; raises what it raised."""
        deadline = time.monotonic() + seconds
        while not self._connection.poll(0.2):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer after {seconds} s:\n{self.log.read_text()[-3000:]}")
        try:
            result, error = pickle.loads(self._connection.recv_bytes())
        except EOFError:
            raise RuntimeError(f"the engine process died:\n{self.log.read_text()[-3000:]}") from None
        if error is not None:
            raise error
        return result

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call and wait."""
        self.send(method, *args, **kwargs)
        return self.wait()

    def close(self) -> None:
        """Shut the engine down and end the process."""
        if self.process.poll() is None:
            self.call("shutdown")
        self._connection.close()
        self.process.wait(60)


def _serve(connection: Connection) -> None:
    from rljob_worker.engine.engine import Engine

    engine: Engine | None = None
    lock = threading.Lock()

    def answer(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            value = operator.attrgetter(method)(engine)
            result, error = (value(*args, **kwargs) if callable(value) else value), None
        except BaseException as raised:
            traceback.print_exc()
            result, error = None, raised
        with lock:
            connection.send_bytes(pickle.dumps((result, error)))

    while True:
        try:
            method, args, kwargs = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if method == "__init__":
            engine = Engine(**kwargs)
        else:
            threading.Thread(target=answer, args=(method, args, kwargs), daemon=True).start()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
