"""Cost of environments that fail: a run's time against that of the same run left alone, and what it counts.

In 10 % of the training steps one step of an environment, drawn by seed, ends its process, hangs until `stepSeconds`
(1), raises, or answers what is no answer. Nothing may be lost or trained on twice, and each failure is counted once.

    python benchmarks/episode_faults.py [--mode Colocated Async] [--steps 200]

Times are those of steps: starting is not counted, which would make the ratio smaller.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "worker" / "driver")]

from failing_worlds import GROUPS, MODES, classes, drawn_faults, failures, job_of, whole_groups  # noqa: E402
from figures import Figure, report  # noqa: E402
from jobs import events, finish, run, start_faulty  # noqa: E402

from rljob_worker.records.steps import read_steps  # noqa: E402

SLOWER = 1.5
SHARE = 10
"""One in so many steps."""
RUN_SECONDS = 3600.0


def seconds_of(job: Path, folder: Path, faults: list[dict[str, Any]]) -> float:
    """Seconds of all steps of a run; SystemExit where it failed."""
    code, output = finish(start_faulty(job, folder, faults, cold=True), RUN_SECONDS)
    if code:
        raise SystemExit(output)
    return sum(record.step_seconds for record in read_steps(folder))


def figures_of(mode: str, steps: int, folder: Path) -> list[Figure]:
    """The rows of a mode; AssertionError where a prompt is lost, taken twice or partial."""
    folder.mkdir()
    job, faults = job_of(folder, steps, mode=mode, step_seconds=1), drawn_faults(steps, steps // SHARE)
    calm = seconds_of(job, folder / "calm", [])
    struck = seconds_of(job, folder / "struck", faults)
    met = classes([event for event in events(folder / "struck") if event["event"] == "environment"])
    counted = failures(folder / "struck")
    whole_groups(folder / "struck", range(1, steps + 1))
    code, output = run("audit", folder / "struck")
    trained = re.search(r"(\d+) trained", output)
    assert (code, trained and int(trained[1])) == (0, steps * GROUPS), output
    print(f"{mode}: injected {dict(classes(faults))}, met {dict(met)}, counted {dict(counted)}", flush=True)
    what = f"{mode}, {steps} steps, environments that fail in {steps // SHARE} of them"
    note = f"{struck:.1f} s, {calm:.1f} s"
    differing = sum(((classes(faults) - counted) + (counted - classes(faults))).values())
    return [
        Figure(f"{what}: time", "the same run, calm", struck / calm, SLOWER, at_most=True, note=note),
        Figure(f"{what}: failures that are not counted once", "those injected", differing, 0, at_most=True),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="(default both)")
    parser.add_argument("--steps", type=int, default=200, help="(default 200)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="episode-faults-") as name:
        return report([row for mode in given.mode for row in figures_of(mode, given.steps, Path(name) / mode)])


if __name__ == "__main__":
    sys.exit(main())
