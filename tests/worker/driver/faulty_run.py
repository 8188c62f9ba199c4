"""`rljob run` with faults: usage `faulty_run.py JOB OUTPUT '{"do": ..., ...}' [OPTION OF RUN]...`; or a list of them.

{"do": "kill", "process": "trainer-0", "phase": "actor_train", "step": 3, "delay": 0.01, "signal": 9}
    SIGKILL, or the signal given, to the named process so long after the phase of that step began (`driver`: this one,
    `reward`: a scoring process, `environment`: one that holds environments). An event `kill` says in which phase the
    job was at that instant, and which step's fault it is: after its delay the job may be in the next step.
{"do": "sleep", "before": "wake_up", "step": 2, "seconds": 0.2}
    The driver sleeps before that phase begins, outside every phase.
{"do": "stall", "phase": "wake_up", "step": 2, "process": "trainer-0"}
    SIGSTOP to the process as the phase begins; with "seconds": 2, SIGCONT so long after
    it, or the signal of that name in "then".
{"do": "interleave", "seconds": 0.00005}
    The driver's threads take turns that often, a hundred times as often as Python lets them.
{"do": "environment", "step": 3, "call": 5, "says": "die"}
    What the fifth action of that step's episodes says when it comes to its environment first, or the next one where
    an asynchronous step has fewer; tried again, it is what the policy said. After one that costs a process, the next
    waits until that is lost: what was given to it as well is never done there.
{"do": "flip", "phase": "rollout_wake_kv", "step": 2}
    One bit of one weight of engine-0 is flipped as the phase begins, after the weights were landed and verified.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray

from rljob_worker.cli.main import main
from rljob_worker.cluster import cluster
from rljob_worker.confined.process import ConfinedProcess
from rljob_worker.driver import job
from rljob_worker.environments.base import Call, Step
from rljob_worker.environments.episodes import EpisodeEnvironment
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.records import events

MODULES = {"reward": "rljob_worker.rewards.worker", "environment": "rljob_worker.environments.host"}
"""Modules that confined processes run."""


def install(faults: list[dict[str, Any]]) -> None:
    for fault in faults:
        if fault["do"] == "interleave":
            sys.setswitchinterval(fault["seconds"])
    said = [fault for fault in faults if fault["do"] == "environment"]
    faults = [fault for fault in faults if fault["do"] not in ("interleave", "environment")]
    pids = {"driver": os.getpid()}
    start, write_phase = cluster.Cluster.start, events.EventLog.phase

    def started(self: cluster.Cluster, calls: Any) -> None:
        start(self, calls)
        current["engine"] = self.engines[0].handle
        pids.update({p.name: p.pid for p in (*self.trainers, *self.engines, *self.judges) if p.pid is not None})

    def asked(self: EpisodeEnvironment) -> Call:
        call = ask(self)
        # Those that are tried before a run have no step.
        if "log" in current and isinstance(call, Step) and self.position == len(self.actions):
            step = current["log"].step + 1
            calls[step] = calls.get(step, 0) + 1
            for fault in said:
                if (fault["step"], fault["call"]) <= (step, calls[step]) and not current.get("dying"):
                    said.remove(fault)
                    current["dying"] = fault["says"] in ("die", "hang")
                    current["log"].write("environment", says=fault["says"])
                    return Step(fault["says"])
        return call

    def lost(self: EnvironmentHosts, *arguments: Any) -> None:
        lose(self, *arguments)
        current["dying"] = False

    def phase_begins(self: events.EventLog, name: str, gap: float, **lane: str) -> None:
        current["log"] = self
        strikes = []
        for fault in faults:
            if fault["step"] != self.step + 1:
                continue
            if fault["do"] == "sleep" and fault["before"] == name:
                time.sleep(fault["seconds"])
            elif fault["do"] == "flip" and fault["phase"] == name:
                ray.get(current["engine"].__ray_call__.remote(flip_one_bit))
            elif fault.get("phase") == name:
                strikes.append(fault)
        # A step may have a phase twice (`update_weights`, where experts change devices), and its fault once.
        faults[:] = [fault for fault in faults if fault not in strikes]
        write_phase(self, name, gap, **lane)
        for fault in strikes:
            if fault["do"] == "stall" or (fault["process"] == "driver" and "delay" not in fault):
                # It stands before the phase asks it for anything; a driver's thread could come after the phase.
                strike(self, fault)
            else:
                threading.Thread(target=strike, args=(self, fault), daemon=True).start()

    def strike(log: events.EventLog, fault: dict[str, Any]) -> None:
        confined = fault["process"] in MODULES
        pid = confined_process(MODULES[fault["process"]]) if confined else pids[fault["process"]]
        time.sleep(fault.get("delay", 0.0))
        if "seconds" in fault:
            # From outside: a driver that is stopped can wake nobody. Its time begins when the process stands.
            stands = f"until grep -q '^State:.T' /proc/{pid}/status; do [ -d /proc/{pid} ] || exit; sleep 0.02; done"
            wake = f"{stands}; sleep {fault['seconds']}; kill -{fault.get('then', 'CONT')} {pid}"
            subprocess.Popen(["/bin/sh", "-c", wake], start_new_session=True, stdout=subprocess.DEVNULL)
        log.write("kill", process=fault["process"], pid=pid, alive=current["clock"].current, fault_of=fault["step"])
        os.kill(pid, signal.SIGSTOP if fault["do"] == "stall" else fault.get("signal", signal.SIGKILL))

    def confined_process(module: str) -> int:
        """The first of a kind that lives: the others get what comes while it is busy."""
        of_kind = (process for kind, process in confined_processes if kind == module)
        keeper = next(process.popen.pid for process in of_kind if process.popen.poll() is None)
        return int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])

    current: dict[str, Any] = {}
    calls: dict[int, int] = {}
    confined_processes: list[tuple[str, ConfinedProcess]] = []
    initialise, begin_process, ask = job.Job.__init__, ConfinedProcess.__init__, EpisodeEnvironment.call
    lose = EnvironmentHosts._lose

    def keep_clock(self: job.Job, *arguments: Any, **named: Any) -> None:
        initialise(self, *arguments, **named)
        current["clock"] = self.clock

    def keep_process(self: ConfinedProcess, *arguments: Any, **named: Any) -> None:
        begin_process(self, *arguments, **named)
        confined_processes.append((arguments[0], self))

    cluster.Cluster.start = started  # type: ignore[method-assign]
    events.EventLog.phase = phase_begins  # type: ignore[method-assign]
    job.Job.__init__ = keep_clock  # type: ignore[method-assign]
    ConfinedProcess.__init__ = keep_process  # type: ignore[method-assign]
    if said:
        EpisodeEnvironment.call = asked  # type: ignore[method-assign]
        EnvironmentHosts._lose = lost  # type: ignore[method-assign]


def flip_one_bit(actor: Any) -> None:
    """Runs in the engine's process."""

    def flip(worker: Any) -> None:
        import torch

        weight = worker.model_runner.model.model.embed_tokens.weight
        weight.data.view(torch.int32)[5, 0] ^= 1 << 26

    actor._object._engine.collective_rpc(flip)


if __name__ == "__main__":
    given = json.loads(sys.argv[3])
    install(given if isinstance(given, list) else [given])
    sys.exit(main(["run", sys.argv[1], "--output", sys.argv[2], *sys.argv[4:]]))
