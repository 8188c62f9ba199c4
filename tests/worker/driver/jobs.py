"""Running real jobs in processes of their own, for the tests of the driver."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash
import yaml
from support.warm.client import WarmProcess
from support.warm.protocol import DRIVER

from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.checkpoints.state import DriverState
from rljob_worker.checkpoints.store import CheckpointStore
from rljob_worker.records.event_lines import read_events
from rljob_worker.trainer.checked_file import CheckedFile
from rljob_worker.trainer.state_file import StateReader

REPOSITORY = Path(__file__).parents[3]
FAULTY_RUN = Path(__file__).with_name("faulty_run.py")
RUN_SECONDS = 300.0
KV_CACHE_BYTES = 2**26
"""KV cache of each engine: it writes zeros into all of it, a second for the GiB of its own choice."""
Started = subprocess.Popen[str] | WarmProcess


ONE_AND_ONE = {
    "profile": "cpu",
    "trainer": {"devicesPerNode": 1},
    "rollout": {"devicesPerNode": 1},
    "threadsPerDevice": 1,
}
"""Resources of modes with devices of their own: a trainer and an engine."""


def manifest(folder: Path, **spec: Any) -> Path:
    """A small job as a file: quickstart's shape, fewer and shorter steps; top-level fields of the spec may be given."""
    document = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())
    document["metadata"]["name"] = "test-job"
    config = document["spec"]["model"]["random"]["config"]
    config.update(hidden_size=64, intermediate_size=128, head_dim=32, max_position_embeddings=64)
    document["spec"].update(
        {
            "steps": 6,
            "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 4, "ignoreEos": True},
            "checkpoint": {"everySteps": 2, "keep": 2},
            "weightSync": {"probeEverySteps": 2},
            "records": {"trajectoriesEverySteps": 1},
            "timeouts": {"startSeconds": 240, "phaseSeconds": 60},
        }
    )
    document["spec"].update(spec)
    document["spec"]["rollout"] = {"kvCacheBytes": KV_CACHE_BYTES} | document["spec"]["rollout"]
    # What trainers and engines are forked from is then the same for all jobs, and no thread waits for one that waits.
    document["spec"]["resources"] = {"threadsPerDevice": 1} | document["spec"]["resources"]
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def start(
    *arguments: str | Path, environment: dict[str, str] | None = None, cold: bool = False, report: bool = False
) -> Started:
    """`rljob ARGUMENTS` in a session of its own; its processes are forked from some that have imported what they need.

    Args:
        arguments: after `rljob`.
        environment: variables over those of this process.
        cold: start a new interpreter, as users do, for the driver and for each of its workers.
        report: have `run` draw the report at the end, which takes as long as some jobs; a cold one draws it anyway.
    """
    options = ["--no-report"] if arguments[0] == "run" and not (cold or report) else []
    return _start(["-m", "rljob_worker.cli.main", *map(str, arguments), *options], environment or {}, cold)


def start_faulty(
    job: Path, output: Path, faults: dict[str, Any] | list[dict[str, Any]], *options: str, cold: bool = False
) -> Started:
    """`rljob run` in which `faulty_run.py` makes one thing, or several, go wrong."""
    more = options if cold else (*options, "--no-report")
    return _start([str(FAULTY_RUN), str(job), str(output), json.dumps(faults), *more], {}, cold)


def _start(arguments: list[str], environment: dict[str, str], cold: bool) -> Started:
    if not cold:
        return WarmProcess(DRIVER, arguments, {**os.environ, **environment})
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
        preexec_fn=_end_with_the_tests,
    )


def _end_with_the_tests() -> None:
    """PR_SET_PDEATHSIG: Ctrl-C does not reach the session that a job has of its own."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def finish(process: Started, seconds: float = RUN_SECONDS) -> tuple[int, str]:
    """Exit code and output; a process that does not end is killed and the test fails."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"not finished after {seconds} s; its output:\n{output}") from None
    return process.returncode, output


def run(
    *arguments: str | Path,
    environment: dict[str, str] | None = None,
    cold: bool = False,
    report: bool = False,
    seconds: float = RUN_SECONDS,
) -> tuple[int, str]:
    """Run `rljob ARGUMENTS` to its end, which comes within so many seconds; the rest as `start` has it."""
    return finish(start(*arguments, environment=environment, cold=cold, report=report), seconds)


def wait_for(condition: Any, what: str, seconds: float = RUN_SECONDS, pause: float = 0.02) -> Any:
    """The first true value of `condition()`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(pause)
    raise AssertionError(f"{what}: not within {seconds} s")


def events(run_folder: Path) -> list[dict[str, Any]]:
    """The driver's events so far."""
    return read_events(run_folder)


def lone_store(root: Path, keep: int, epoch: int = 1) -> CheckpointStore:
    """A store that no other driver ever takes over."""
    root.mkdir(parents=True, exist_ok=True)
    return CheckpointStore(root, keep, epoch, lambda: None)


def checked(path: Path) -> CheckedFile:
    """Report of a rank on a file that it wrote."""
    content = path.read_bytes()
    return CheckedFile(path.name, len(content), xxhash.xxh3_64_hexdigest(content))


def commit(store: CheckpointStore, state: DriverState, text: str = "state") -> Path:
    """Save a checkpoint whose ranks wrote `TEXT RANK`, each into its file."""
    folder = store.begin(state.step)
    ranks = [folder / f"rank-{rank}" for rank in range(state.world_size)]
    for rank, path in enumerate(ranks):
        path.write_text(f"{text} {rank}")
    return store.commit(folder, replace(state, files=tuple(map(checked, ranks))))


def final_state(run_folder: Path, ranks: int = 1) -> dict[str, str]:
    """Digest of every tensor in the newest checkpoint: weights, optimizer and random states of all ranks."""
    newest = Checkpoints(run_folder / "checkpoints").latest()
    assert newest is not None, f"{run_folder} has no checkpoint"
    digests = {"step": str(newest.step), "cursor": json.dumps(newest.data_cursor, sort_keys=True)}
    return digests | state_of(run_folder / "checkpoints" / f"step-{newest.step}", ranks)


def state_of(checkpoint: Path, ranks: int = 1) -> dict[str, str]:
    """Digest of every tensor in a checkpoint, a critic's among them."""
    digests = {}
    critics = sorted(path.name for path in checkpoint.glob("critic-*.safetensors"))
    for file in [*(f"rank-{rank:05d}.safetensors" for rank in range(ranks)), *critics]:
        reader = StateReader(checkpoint / file)
        for name in sorted(reader.names):
            tensor = reader.read(name).contiguous().flatten()
            digests[f"{file}.{name}"] = hashlib.sha256(tensor.view(_byte()).numpy().tobytes()).hexdigest()
    return digests


def _byte() -> Any:
    import torch

    return torch.uint8


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
