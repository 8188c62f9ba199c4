"""Scripts of tests that import what a trainer or an engine imports: forks of a process that has imported it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.warm.client import WarmProcess
from support.warm.protocol import ENGINE, TRAINER

from rljob_api import RLJobSpec
from rljob_api.profiles.base import BACKEND_AUTOLOAD_VARIABLE
from rljob_worker.engine.environment import engine_environment
from rljob_worker.trainer.environment import trainer_environment

OUTPUT_SHOWN = 3000
_JOB = {
    "steps": 1,
    "model": {"path": "x"},
    "data": {"synthetic": {}},
    "reward": {"name": "match"},
    "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 2, "maxResponseTokens": 8},
    "training": {"precision": "fp32"},
    "resources": {"profile": "cpu", "threadsPerDevice": 1},
}


def variables_of(role: str, spec: RLJobSpec | None = None) -> dict[str, str]:
    """Environment of a script that is to be forked from what trainers or engines of jobs are forked from.

    Args:
        role: TRAINER or ENGINE; any other has the variables of the tests alone.
        spec: the job of which the script has a process; None: one of `jobs.manifest`.
    """
    spec = spec or RLJobSpec.model_validate(_JOB)
    own: dict[str, Callable[[RLJobSpec], dict[str, str]]] = {TRAINER: trainer_environment, ENGINE: engine_environment}
    # `rljob run` sets it for all that it starts.
    of_role = own[role](spec) | {BACKEND_AUTOLOAD_VARIABLE: "0"} if role in own else {}
    return {**os.environ, **of_role, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run_script(
    role: str, script: Path, *processes: Sequence[object], spec: RLJobSpec | None = None, seconds: float = 400
) -> list[str]:
    """Run a script in processes that work side by side, and return the output of each.

    Args:
        role: a role of `support.warm.protocol`, whose modules the processes have imported.
        script: the main module.
        processes: arguments of each process.
        spec: the job of which they are processes; None: one of `jobs.manifest`.
        seconds: until the last one has to end.

    Raises:
        AssertionError: a process did not end with exit code 0; the message has the end of each output.
    """
    environment = variables_of(role, spec)
    started = [WarmProcess(role, [str(script), *map(str, arguments)], environment) for arguments in processes]
    outputs = [_output(process, seconds) for process in started]
    codes = [process.returncode for process in started]
    shown = (f"--- {script.name} {number}\n{text[-OUTPUT_SHOWN:]}" for number, text in enumerate(outputs))
    assert codes == [0] * len(codes), f"{codes}\n" + "\n".join(shown)
    return outputs


def run_text(role: str, text: str, folder: Path, *arguments: object, seconds: float = 400) -> str:
    """Run a script that is given as text, as `run_script` does; its file is made in `folder`."""
    script = folder / "script.py"
    script.write_text(text)
    (output,) = run_script(role, script, arguments, seconds=seconds)
    return output


def answer_in(output: str) -> Any:
    """The last line of an output that is a JSON object or list: libraries log to the same place."""
    lines = [line for line in output.splitlines() if line.startswith(("{", "["))]
    assert lines, output[-OUTPUT_SHOWN:]
    return json.loads(lines[-1])


def _output(process: WarmProcess, seconds: float) -> str:
    try:
        return process.communicate(seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"{process.communicate()[0]}\nnot finished after {seconds} s"
