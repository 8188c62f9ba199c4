"""The phases of a step against those of another commit: the same job in pairs of runs, which take turns.

Both trees run in this environment, the other commit's from a temporary folder. Of each phase the median over a run's
steps is taken, then the ratio in each pair, then the median of the pairs. Beside the seconds stands the processor time
of driver, trainers, engines and whatever else the driver started: on a machine that others use too, it varies less.

    python benchmarks/against_commit.py COMMIT [--pairs N] [--steps N] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from figures import Figure, report

ROOT = Path(__file__).parent.parent
PHASES = {"rollout": "rollout", "actor_train": "training", "update_weights": "weight sync"}
LIMIT = 1.03
WARM_UP_STEPS = 5
Medians = dict[str, dict[str, float]]
"""Medians of a run, by clock (`seconds`, `processor`), then by phase."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="to compare with")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40, help=f"of each run; the first {WARM_UP_STEPS} are not counted")
    parser.add_argument("--manifest", type=Path, default=ROOT / "examples" / "quickstart.yaml")
    parser.add_argument("--threads", type=int, help="of trainers and engines: 1 where others use the machine too")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return run_inside(json.loads(arguments.inside))
    pairs: list[tuple[Medians, Medians]] = []
    with tempfile.TemporaryDirectory(prefix="rljob-against-") as folder:
        other = unpacked(arguments.commit, Path(folder) / "other")
        for number in range(arguments.pairs):
            # Who goes first changes from pair to pair, so that what the first run leaves behind counts for both.
            trees = [ROOT, other] if number % 2 else [other, ROOT]
            medians = {tree: run(tree, arguments, Path(folder) / f"{number}-{int(tree is ROOT)}") for tree in trees}
            pairs.append((medians[ROOT], medians[other]))
            print(json.dumps({"pair": number + 1, "this": medians[ROOT], "other": medians[other]}), flush=True)
    return report([*figures(pairs, arguments.commit)])


def figures(pairs: Sequence[tuple[Medians, Medians]], commit: str) -> Iterator[Figure]:
    """A row for each phase and clock; the limit is that of seconds."""
    for clock, unit in (("seconds", "seconds"), ("processor", "processor seconds")):
        for phase, what in PHASES.items():
            ratios = [this[clock][phase] / other[clock][phase] for this, other in pairs]
            note = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} pairs"
            yield Figure(f"{what}, {unit}", commit, statistics.median(ratios), LIMIT, at_most=True, note=note)


def unpacked(commit: str, folder: Path) -> Path:
    """The files of a commit, in a folder that is made."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


def run(tree: Path, arguments: argparse.Namespace, output: Path) -> Medians:
    """Run the job with the code of `tree`, whose folders come before those that are installed; the medians of its
    phases."""
    settings = [f"spec.steps={arguments.steps}"]
    if arguments.threads:
        settings.append(f"spec.resources.threadsPerDevice={arguments.threads}")
    order = {"manifest": str(arguments.manifest.resolve()), "settings": settings, "output": str(output)}
    code = os.pathsep.join(str(tree / folder) for folder in ("crds", "operator", "worker"))
    ended = subprocess.run(
        [sys.executable, __file__, "-", "--inside", json.dumps(order)],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": code},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if ended.returncode:
        raise SystemExit(f"{tree}: the run ended with exit code {ended.returncode}\n{ended.stdout[-4000:]}")
    return medians_of(output)


def medians_of(output: Path) -> Medians:
    """The medians of a run folder's phases, of its steps after the first."""
    steps = [json.loads(line)["phases"] for line in (output / "steps.jsonl").read_text().splitlines()]
    counted: dict[str, list[float]] = json.loads((output / "processor.json").read_text())
    return {
        "seconds": {name: statistics.median(step[name] for step in steps[WARM_UP_STEPS:]) for name in PHASES},
        "processor": {name: statistics.median(counted[name][WARM_UP_STEPS:]) for name in PHASES},
    }


# --- in the process that runs the job -----------------------------------------------------------


def run_inside(order: dict[str, str | list[str]]) -> int:
    """`rljob run`, whose phases' processor time is written into the run folder."""
    import rljob_worker
    from rljob_worker.cli.main import main as rljob
    from rljob_worker.phases import PhaseClock

    if not Path(rljob_worker.__file__).is_relative_to(Path.cwd()):
        raise SystemExit(f"the code of {rljob_worker.__file__} is in use, not that of {Path.cwd()}")
    counted: dict[str, list[float]] = {}
    of_phase = PhaseClock.phase
    processes: list[int] = []

    @contextmanager
    def phase(clock: PhaseClock, name: str) -> Iterator[None]:
        if not counted:
            processes[:] = descendants(os.getpid())
        before = [processor_time(pid) for pid in processes]
        with of_phase(clock, name):
            yield
        spent = [processor_time(pid) - so_far for pid, so_far in zip(processes, before)]
        counted.setdefault(name, []).append(sum(max(0.0, one) for one in spent))

    setattr(PhaseClock, "phase", phase)  # noqa: B010
    output, settings = str(order["output"]), order["settings"]
    options = [part for setting in settings for part in ("--set", setting)]
    sys.argv = ["rljob", "run", str(order["manifest"]), "--output", output, "--no-report", *options]
    code = rljob()
    (Path(output) / "processor.json").write_text(json.dumps(counted))
    return code


def descendants(pid: int) -> list[int]:
    """A process and all that it started, which are there now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def processor_time(pid: int) -> float:
    """Seconds of all threads of a process; 0 where it is gone. Its clock has the number of `clock_getcpuclockid`."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


if __name__ == "__main__":
    sys.exit(main())
