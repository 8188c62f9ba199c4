"""The trace of a long run: the processor time that it takes to write, and how large it is.

    python benchmarks/run_trace.py [--steps 10000]

The run has two trainers and two engines on shared devices: twelve phases a step, of which one runs twice, and the
records that such a job writes, with memory of each process and its own times. Exits with 1 when the trace takes more
than 5 s of a processor or has more than 10 MB.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import Figure, report

from rljob_api.phases import PHASES, WAITS
from rljob_worker.report.trace import build_trace

SECONDS_LIMIT, MEGABYTES_LIMIT = 5.0, 10.0
NAMES = [name for name in PHASES if name not in (*WAITS, "eval", "ref_log_probs")]
PROCESSES = ("trainer-0", "trainer-1", "engine-0", "engine-1")
METRICS = [f"train/metric_{number}" for number in range(30)]


def step_of(number: int, begin: float, chance: random.Random) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The record of a step and its events."""
    at, phases, events = begin, dict.fromkeys(NAMES, 0.0), []
    ranks: dict[str, dict[str, list[list[float]]]] = {name: {} for name in PROCESSES}
    for name in [*NAMES, "update_weights"]:
        gap, seconds = chance.uniform(1e-4, 1e-3), chance.lognormvariate(-3.0, 1.0)
        at += gap
        events.append({"time": at, "attempt": 1, "step": number - 1, "event": "phase", "phase": name, "gap": gap})
        for process in PROCESSES:
            if process.startswith("engine") == name.startswith("rollout"):
                span = [round(at - begin + 1e-4, 5), round(at - begin + seconds * chance.uniform(0.8, 1.0), 5)]
                ranks[process].setdefault(name, []).append(span)
        phases[name] += seconds
        at += seconds + 5e-5
    whole = at - begin
    metrics = dict.fromkeys(METRICS, chance.random()) | {
        "rollout/raw_reward": chance.random(),
        "rollout/response_len/mean": 100 * chance.random(),
        "train/grad_norm": chance.random(),
        "train/train_rollout_logprob_abs_diff": 1e-3 * chance.random(),
    }
    memory = {name: {"sleep": {"resident_bytes": chance.randrange(10**9), "backup_bytes": 0}} for name in PROCESSES}
    record = {
        **{"step": number, "attempt": 1, "time": at, "step_seconds": whole, "phases": phases},
        **{"other": whole - sum(phases.values()), "switch_seconds": 0.1, "metrics": metrics, "memory": memory},
        **{"weights": {"version": number, "bytes": 10**8, "verified": True, "send": {"fill": 0.1}, "receive": {}}},
        **{"busy_seconds": dict.fromkeys(PROCESSES, 1.5), "overlapped": {"reward": 0.25}, "ranks": ranks},
        **{"index": number - 1, "rerun": False},
    }
    return record, events


def write_run(folder: Path, steps: int) -> None:
    """A run folder as a driver leaves it, as far as a trace reads it."""
    chance = random.Random(1)

    def made() -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        at = 1.7e9
        for number in range(1, steps + 1):
            record, events = step_of(number, at, chance)
            at = record["time"]
            yield record, events

    (folder / "run.json").write_text(json.dumps({"attempt": 1, "job": {"metadata": {"name": "long"}, "spec": {}}}))
    with (folder / "steps.jsonl").open("w") as records, (folder / "events.jsonl").open("w") as lines:
        for record, events in made():
            records.write(json.dumps(record) + "\n")
            lines.writelines(json.dumps(event) + "\n" for event in events)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    steps: int = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, steps)
        file, began = folder / "trace.json.gz", time.process_time()
        events = build_trace(folder, file)
        seconds, megabytes = time.process_time() - began, file.stat().st_size / 1e6
    what = f"trace of {steps:,} steps, {events:,} events"
    return report(
        [
            Figure(f"{what}: seconds of a processor", "-", seconds, SECONDS_LIMIT, at_most=True),
            Figure(f"{what}: MB", "-", megabytes, MEGABYTES_LIMIT, at_most=True),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
