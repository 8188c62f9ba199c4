"""Takes the place of Ray's `setup_worker.py`: trainers and engines are forked, all other workers start as ever.

This process stays: it is the one that Ray and the driver's reaper know as a child, and when it is killed the worker is.
"""

from __future__ import annotations

import json
import os
import socket
import sys

sys.path.insert(0, os.path.dirname(__file__))

from protocol import ENGINE, FAULT, PRELOADED, TRAINER, VARIABLE, Request, send, with_variables

CONTEXT = "--serialized-runtime-env-context="
OF_ENGINES, OF_BOTH = "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"
"""Variables that a job gives its engines, and its trainers too, but no other worker."""


def main(arguments: list[str]) -> int:
    script = next(index for index, argument in enumerate(arguments) if not argument.startswith("--"))
    context = next((json.loads(a.removeprefix(CONTEXT)) for a in arguments if a.startswith(CONTEXT)), {})
    variables = context.get("env_vars", {})
    role = ENGINE if OF_ENGINES in variables else TRAINER if OF_BOTH in variables else None
    server = os.environ.get(VARIABLE)
    if server is None or role is None or context.get("command_prefix"):
        original = os.path.join(os.path.dirname(arguments[script]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, original, *arguments])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(server)
    rest = [a for a in arguments[script:] if not a.startswith((CONTEXT, "--language="))]
    environment = with_variables(os.environ, variables)
    if role == ENGINE and FAULT in environment:
        # It writes nothing that a run keeps: any fork will do.
        environment.pop(PRELOADED, None)
    request = Request(role, rest, environment, os.getcwd())
    send(connection, request, (0, 1, 2))
    said = connection.makefile().read().split()
    return int(said[1]) & 0xFF if len(said) == 2 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
