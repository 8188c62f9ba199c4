"""Calls of a program's functions on a server that runs one program a request: what is sent there, and what comes back.

`script` is a program that needs nothing but Python: it holds the sources of the modules that answer calls. On its
standard input it gets `{"nonce", "source", "requests"}`, a line of JSON. What it answers are lines that begin with the
nonce; what the program prints goes to the standard error. The standard library alone.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from typing import Any

from rljob_worker.sandbox import answering, channel, plain

_NEEDED = (channel, plain, answering)
_SCRIPT = """\
import sys, types
for name in ("rljob_worker", "rljob_worker.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, source in SOURCES.items():
    module = sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules["rljob_worker.sandbox"], name.rpartition(".")[2], module)
    exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
sys.modules["rljob_worker.sandbox.remote_call"].main()
"""


class _Answers(channel.Channel):
    """Requests that are all there, and the place of their answers."""

    def __init__(self, descriptor: int, nonce: str, requests: list[Any]) -> None:
        super().__init__(descriptor)
        self._nonce, self._requests = nonce, requests
        self._to = descriptor

    def send(self, message: Any) -> None:
        rest = memoryview(f"{self._nonce} {json.dumps(message)}\n".encode())
        while rest:
            rest = rest[os.write(self._to, rest) :]

    def receive(self) -> Any:
        if not self._requests:
            raise EOFError
        return self._requests.pop(0)


def script() -> str:
    """The program that is sent."""
    modules = [*_NEEDED, sys.modules[__name__]]
    sources = {module.__name__: inspect.getsource(module) for module in modules}
    return f"SOURCES = {sources!r}\n{_SCRIPT}"


def answers(printed: str, nonce: str) -> list[str]:
    """The answers in what the script printed, each as JSON: first what the program has, then those to the requests."""
    return [line[len(nonce) + 1 :] for line in printed.split("\n") if line.startswith(f"{nonce} ")]


def main() -> None:
    """Answer the requests; does not return."""
    task = json.loads(sys.stdin.readline())
    to = os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answering.answer(_Answers(to, task["nonce"], task["requests"]), task["source"])
    sys.stderr.flush()
    # Threads of the program are not waited for.
    os._exit(0)
