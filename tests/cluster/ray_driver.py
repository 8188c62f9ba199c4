"""The driver of one job as the stand-in plays it: a run folder that survives, and attempts that a script lets fail."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_api.phases import SWITCH_PHASES
from rljob_api.spec import RLJobSpec
from rljob_api.validation import load_manifest

EXIT_STOPPED = 75
PAGE = 1000
PHASE_SHARES = {"rollout": 0.5, "wake_up": 0.05, "actor_train": 0.3, "update_weights": 0.1, "sleep": 0.04}
Record = dict[str, Any]


@dataclass
class Attempt:
    """One attempt of the driver.

    `exit_code` at `fail_at_step` completed steps (None: the job is done when all steps are); a negative code is a
    signal. `hang_at_step`: it stays there for good. `stop_seconds`: how long it saves when it is asked to stop.
    """

    exit_code: int | None = None
    fail_at_step: int = 0
    hang_at_step: int | None = None
    log: tuple[str, ...] = ()
    start_seconds: float = 0.05
    step_seconds: float = 0.1
    stop_seconds: float = 0.05


@dataclass
class Script:
    """Attempts of a job; the last one stands for all that follow."""

    attempts: list[Attempt] = field(default_factory=lambda: [Attempt()])
    reward: float = 0.5

    def attempt(self, number: int) -> Attempt:
        """The attempt with this number, from 0."""
        return self.attempts[min(number, len(self.attempts) - 1)]


@dataclass
class Run:
    """The run folder of one RLJob: it outlives pods and attempts."""

    records: list[Record] = field(default_factory=list)
    attempts: int = 0
    saved_step: int | None = None
    checkpoints_requested: int = 0


class Driver:
    """One process: made by a submission, gone with its exit, with `kill`, or with the head pod."""

    def __init__(self, run: Run, script: Script, environment: Mapping[str, str]) -> None:
        text = gzip.decompress(base64.b64decode(environment["RLJOB_MANIFEST"]))
        self.spec: RLJobSpec = load_manifest(json.loads(text)).spec
        self.run = run
        self.script = script
        self.plan = script.attempt(run.attempts)
        run.attempts += 1
        self.attempt = run.attempts
        self.step = run.saved_step or 0
        self.ready = False
        self.phase: str | None = None
        self.last_read = -1
        self.stopping = asyncio.Event()
        self.log = ["rljob: the driver begins"]

    async def work(self) -> int:
        """Run to the end and return the exit code."""
        await self._pause(self.plan.start_seconds)
        self.ready = True
        while not self.stopping.is_set():
            if self.plan.exit_code is not None and self.step >= self.plan.fail_at_step:
                self.log += self.plan.log or (f"rljob: ends with {self.plan.exit_code} as the test wants",)
                return self.plan.exit_code
            if self.step >= self.spec.steps:
                await self._linger()
                return 0
            if self.plan.hang_at_step is not None and self.step >= self.plan.hang_at_step:
                self.phase = "rollout"
                await self.stopping.wait()
                break
            self.phase = "actor_train"
            await self._pause(self.plan.step_seconds)
            if not self.stopping.is_set():
                self._finish_step()
        await asyncio.sleep(self.plan.stop_seconds)
        self.save()
        self.log.append(f"rljob: saved step {self.step}, stopped as asked")
        return EXIT_STOPPED

    def status(self) -> dict[str, Any]:
        """Content of `/v1/status`."""
        return {
            "ready": self.ready,
            "step": self.step,
            "steps": self.spec.steps,
            "phase": self.phase,
            "attempt": self.attempt,
            "weight_version": self.step,
            "last_checkpoint_step": self.run.saved_step,
            "stopping": self.stopping.is_set(),
        }

    def steps(self, after: int) -> dict[str, Any]:
        """Content of `/v1/steps`."""
        found = self.run.records[max(after, -1) + 1 :][:PAGE]
        if found:
            self.last_read = max(self.last_read, found[-1]["index"])
        return {"steps": found, "total": len(self.run.records)}

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self.stopping.wait(), seconds)
        except TimeoutError:
            return

    async def _linger(self) -> None:
        deadline = time.monotonic() + self.spec.records.linger_seconds
        while self.last_read < len(self.run.records) - 1 and time.monotonic() < deadline:
            await self._pause(0.05)

    def _finish_step(self) -> None:
        self.step += 1
        known = {record["step"] for record in self.run.records}
        seconds = self.plan.step_seconds
        phases = {name: seconds * share for name, share in PHASE_SHARES.items()}
        metrics = {
            "rollout/raw_reward": self.script.reward,
            "rollout/response_len/mean": 64.0,
            "train/train_rollout_logprob_abs_diff": 0.01,
            "perf/step_time": seconds,
        }
        self.run.records.append(
            {
                "index": len(self.run.records),
                "rerun": self.step in known,
                "step": self.step,
                "attempt": self.attempt,
                "time": time.time(),
                "step_seconds": seconds,
                "phases": phases,
                "other": seconds * (1 - sum(PHASE_SHARES.values())),
                "switch_seconds": sum(phases[name] for name in SWITCH_PHASES if name in phases),
                "nested": [],
                "applied": True,
                "recovered": False,
                "metrics": metrics,
                "weights": {"version": self.step, "bytes": 1 << 20},
                "memory": {},
                "busy_seconds": {},
                "overlapped": {},
            }
        )
        if self.step % self.spec.checkpoint.every_steps == 0 or self.step == self.spec.steps:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the completed steps."""
        self.run.saved_step = self.step if self.step else self.run.saved_step
