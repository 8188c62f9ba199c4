"""Running the vendors' programs: each call has a deadline, and says why there is no answer."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

SECONDS = 20.0
"""Deadline of a call: npu-smi takes seconds on a busy node, and hangs for good on a broken driver."""
_ELSEWHERE = ("/usr/local/bin", "/usr/local/sbin", "/usr/local/Ascend/driver/tools", "/usr/bin", "/usr/sbin")
"""Folders of npu-smi and hccn_tool, beside the PATH (facts of HAMi's, MindCluster's and ROLL's guides)."""
_HIDDEN = ("LD_PRELOAD", "ASCEND_RT_VISIBLE_DEVICES")
"""CANN's reference: the device list is not valid together with the HCCN tool. And no hook belongs in a vendor's
program."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Output of a program, or the reason for its absence."""

    text: str = ""
    problem: str = ""


def ask(program: str, *arguments: str, seconds: float = SECONDS) -> Answer:
    """Run a program in English, without a shell; never raises."""
    path = find(program)
    if path is None:
        return Answer(problem=f"{program} is not on the PATH, nor in {', '.join(_ELSEWHERE[:3])}")
    environment = {name: value for name, value in os.environ.items() if name not in _HIDDEN} | {"LC_ALL": "C"}
    command = " ".join([program, *arguments])
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, stdin=subprocess.DEVNULL, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired:
        return Answer(problem=f"`{command}` gave no answer within {seconds:g} s")
    except OSError as error:
        return Answer(problem=f"`{command}` cannot be run: {error.strerror or error}")
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        said = last_line(done.stderr.decode(errors="replace")) or last_line(text)
        return Answer(text, f"`{command}` ended with exit code {done.returncode}{': ' if said else ''}{said}")
    return Answer(text)


def find(program: str) -> str | None:
    """Path of a program."""
    folders: Sequence[str] = [*os.environ.get("PATH", os.defpath).split(os.pathsep), *_ELSEWHERE]
    return shutil.which(program, path=os.pathsep.join(folders))


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
