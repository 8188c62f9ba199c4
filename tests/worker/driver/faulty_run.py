"""`rljob run JOB OUTPUT` with one fault: usage `faulty_run.py JOB OUTPUT '{"do": ..., ...}' [OPTION OF RUN]...`.

{"do": "kill", "process": "trainer-0", "phase": "actor_train", "step": 3, "delay": 0.01, "signal": 9}
    SIGKILL, or the signal given, to the named process (`driver`: this one) so long after the phase of that step began.
    An event `kill` says in which phase the job was at that instant.
{"do": "sleep", "before": "wake_up", "step": 2, "seconds": 0.2}
    The driver sleeps before that phase begins, outside every phase.
{"do": "stall", "phase": "wake_up", "step": 2, "process": "trainer-0"}
    SIGSTOP to the process as the phase begins.
{"do": "flip", "phase": "rollout_wake_kv", "step": 2}
    One bit of one weight of engine-0 is flipped as the phase begins, after the weights were landed and verified.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import ray

from rljob_worker.cli.main import main
from rljob_worker.driver import cluster, events, job


def install(fault: dict[str, Any]) -> None:
    pids = {"driver": os.getpid()}
    start, write_phase = cluster.Cluster.start, events.EventLog.phase

    def started(self: cluster.Cluster, calls: Any) -> None:
        start(self, calls)
        current["engine"] = self.engines[0].handle
        pids.update({p.name: p.pid for p in (*self.trainers, *self.engines) if p.pid is not None})

    def phase_begins(self: events.EventLog, name: str) -> None:
        if fault["step"] == self.step + 1:
            if fault["do"] == "sleep" and fault["before"] == name:
                time.sleep(fault["seconds"])
            elif fault["do"] == "flip" and fault["phase"] == name:
                ray.get(current["engine"].__ray_call__.remote(flip_one_bit))
            elif fault.get("phase") == name:
                write_phase(self, name)
                threading.Thread(target=strike, args=(self, pids[fault["process"]]), daemon=True).start()
                return
        write_phase(self, name)

    def strike(log: events.EventLog, pid: int) -> None:
        time.sleep(fault.get("delay", 0.0))
        log.write("kill", process=fault["process"], pid=pid, alive=current["clock"].current)
        os.kill(pid, signal.SIGSTOP if fault["do"] == "stall" else fault.get("signal", signal.SIGKILL))

    current: dict[str, Any] = {}
    initialise = job.Job.__init__

    def keep_clock(self: job.Job, *arguments: Any, **named: Any) -> None:
        initialise(self, *arguments, **named)
        current["clock"] = self.clock

    cluster.Cluster.start = started  # type: ignore[method-assign]
    events.EventLog.phase = phase_begins  # type: ignore[method-assign]
    job.Job.__init__ = keep_clock  # type: ignore[method-assign]


def flip_one_bit(actor: Any) -> None:
    """Runs in the engine's process."""

    def flip(worker: Any) -> None:
        import torch

        weight = worker.model_runner.model.model.embed_tokens.weight
        weight.data.view(torch.int32)[5, 0] ^= 1 << 26

    actor._engine._engine.collective_rpc(flip)


if __name__ == "__main__":
    install(json.loads(sys.argv[3]))
    sys.exit(main(["run", sys.argv[1], "--output", sys.argv[2], *sys.argv[4:]]))
