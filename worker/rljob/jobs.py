"""Checking and running manifests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rljob.runs import Run, load
from rljob_api.problems import Problem
from rljob_api.validation import ManifestError, load_manifest
from rljob_api.wire.exit_codes import ExitCode

_LAST_LINES = 20
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that end a line in YAML, or that it refuses."""
Manifest = str | os.PathLike[str] | Mapping[str, Any]


class JobError(RuntimeError):
    """A job did not succeed. `exit_code` is that of `rljob run`; the message has its last lines."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def validate(manifest: Manifest, *, set: Sequence[str] = ()) -> list[Problem]:
    """Check a manifest by the API's rules, as `kubectl apply` would; nothing of its files is looked at.

    Args:
        manifest: a file, YAML text, or the document itself.
        set: overrides like `spec.steps=5`.

    Returns:
        All problems, each with its path; none where it is valid.
    """
    try:
        load_manifest(_given(manifest), overrides=list(set))
    except ManifestError as error:
        return error.problems
    return []


def run(
    manifest: Manifest,
    output: str | os.PathLike[str],
    *,
    set: Sequence[str] = (),
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """Run a job on this machine to its end, as `rljob run` does, in a process of its own.

    An interrupt (Ctrl-C, or a notebook's stop) asks the job to stop after the current step, and is raised when it has
    saved its state.

    Args:
        manifest: a file, YAML text, or the document itself; paths in the latter two are relative to this process's
            folder.
        output: run folder.
        set: overrides like `spec.steps=5`.
        resume: continue the run in `output` if it holds this job's, else begin.
        quiet: print nothing of what the job prints.

    Raises:
        JobError: the job did not succeed; or the manifest is wrong (exit code 2), and nothing was started.
    """
    given = _given(manifest)
    from_file = isinstance(given, Path)
    command = [sys.executable, "-m", "rljob_worker.cli.main", "run", str(given) if from_file else "-"]
    command += ["--output", str(output), *(part for one in set for part in ("--set", one))]
    command += ["--resume", "auto"] if resume else []
    text = given if isinstance(given, str) else None
    if isinstance(given, dict):
        if problems := validate(given, set=set):
            raise JobError(ExitCode.USER_ERROR, f"rljob: {ManifestError(problems, 'manifest')}")
        text = _sent(given)
    code, last = _follow(command, text, quiet)
    if code:
        raise JobError(code, last)
    return load(output)


def _given(manifest: Manifest) -> Path | str | dict[str, Any]:
    if isinstance(manifest, Mapping):
        return dict(manifest)
    if isinstance(manifest, str) and ("\n" in manifest or ": " in manifest):
        return manifest
    return Path(manifest)


def _sent(document: Mapping[str, Any]) -> str:
    """A valid document as the command reads it: JSON, in which a text `1e3` stays one, with escapes for what YAML does
    not take as it is."""
    text = json.dumps(document, ensure_ascii=False)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def _follow(command: Sequence[str], text: str | None, quiet: bool) -> tuple[int, str]:
    """Run a command and print its lines; its exit code and the last of them."""
    lines: deque[str] = deque(maxlen=_LAST_LINES)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin:
            process.stdin.write(text or "")
        for line in process.stdout:
            lines.append(line)
            if not quiet:
                print(line, end="", flush=True)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        process.wait()
        raise
    except BrokenPipeError:
        # It ended before it read the manifest; its lines say why.
        lines.extend(process.stdout)
    return process.wait(), "".join(lines).strip()
