"""`--deep`: the devices are used, each step in processes of its own with the environment that a job gives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import TypedDict

from rljob_api.wanted import Wanted
from rljob_worker.doctor.devices import VISIBLE_VARIABLES
from rljob_worker.doctor.facts import NodeFacts
from rljob_worker.doctor.findings import Finding, Status, problem, warning
from rljob_worker.doctor.programs import last_line

SECONDS = 600.0
"""Deadline of a step: the first operators on an NPU are compiled for minutes."""
_STEPS = {
    "saver": "memory given back and taken again",
    "checksum": "checksum on the device as on the CPU",
    "sharing": "a tensor shared between two processes",
    "collective": "all-reduce over the visible devices",
    "engine": "memory after vLLM's sleep",
    "graphs": "captured graphs over a sleep and new weights",
}
"""Step -> name of its finding, in the order of a job: what is sleeping, handed over, reduced, generated."""
_OPTIONAL = ("graphs",)
"""Steps that only some jobs need: a warning where they fail."""
MODULE = "rljob_worker.doctor.deep_steps"
_MARK = "rljob-doctor-finding "


class Settings(TypedDict):
    """Arguments of a step."""

    kind: str
    """Kind of the devices."""
    saver: str
    """A `MemorySaverMode`."""
    devices: list[str]
    """Names in the variable of visible devices."""


def deep_findings(facts: NodeFacts, wanted: Wanted | None) -> list[Finding]:
    """Try every step on this node; each has a deadline, and one that fails does not keep the next from being tried."""
    trainer = dict(wanted.trainer) if wanted is not None else {}
    rollout = dict(wanted.rollout) if wanted is not None else {}
    mode = wanted.memory_saver.value if wanted is not None else ("off" if facts.kind == "cpu" else "preload")
    settings: Settings = {"kind": facts.kind, "saver": mode, "devices": _devices(facts)}
    # The memory saver's memory cannot be exported; a trainer takes what it shares from elsewhere.
    plain = {name: value for name, value in trainer.items() if name != "LD_PRELOAD" and not name.startswith("TMS_")}
    environments = {"saver": trainer, "checksum": plain, "sharing": plain, "collective": trainer, "engine": rollout}
    # Whatever the job has: torch_npu captures nothing with the profile's 2.
    environments["graphs"] = rollout | {"TASK_QUEUE_ENABLE": "1"}
    return [_step(name, settings, environments[name]) for name in _STEPS]


def _devices(facts: NodeFacts) -> list[str]:
    """Devices that this node's processes see, as the variable of visible devices names them; on the CPU two shares."""
    if facts.kind == "cpu":
        return ["0", "1"]
    value = facts.trainer.variables.get(VISIBLE_VARIABLES[facts.kind])
    return value.split(",") if value else [str(i) for i in range(len(facts.device_files))]


def _step(step: str, settings: Settings, environment: Mapping[str, str]) -> Finding:
    name, wanted = _STEPS[step], "it works"
    bad = warning if step in _OPTIONAL else problem
    command = [sys.executable, "-m", MODULE, step, json.dumps(settings)]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=SECONDS, env={**os.environ, **environment}
        )
    except subprocess.TimeoutExpired:
        return bad(name, f"not done within {SECONDS:g} s", wanted, "the devices hang, or another job holds them")
    output = done.stdout.decode(errors="replace")
    said = next((line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)), None)
    if said is None:
        why = last_line(done.stderr.decode(errors="replace")) or last_line(output)
        fix = "the lines above name what has to be right first; `docs/first-hour-on-npu.md` has the step by hand"
        return bad(name, f"exit code {done.returncode}: {why}", wanted, fix)
    fields = json.loads(said)
    return Finding(name, Status(fields["status"]), fields["found"], fields["wanted"], fields["fix"])


def answer(finding: Finding) -> None:
    """Print a step's finding for the process that started it."""
    fields = {"status": finding.status.value, "found": finding.found, "wanted": finding.wanted, "fix": finding.fix}
    print(_MARK + json.dumps(fields), flush=True)
