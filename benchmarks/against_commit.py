"""The phases of a step against those of another commit: the same job in pairs of runs, whose steps take turns.

The other commit runs from a temporary folder; where its lock file is another one, in an environment made from that. The
two runs of a pair are there at once, and while one is in a step, the other waits before its own: what a machine does
from minute to minute meets both. Of each phase, and of what is in none, the median over a run's steps is taken, then
the ratio in each pair, then the median of the pairs. Beside the seconds stands the processor time of driver, trainers,
engines and whatever else the driver started: on a machine that others use too, it varies less.

    python benchmarks/against_commit.py COMMIT [--pairs N] [--steps N] [--manifest FILE] [--set FIELD=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from figures import Figure, report

ROOT = Path(__file__).parent.parent
PHASES = {"rollout": "rollout", "actor_train": "training", "update_weights": "weight sync"}
OTHER = "other"
LIMIT = 1.03
WARM_UP_STEPS = 5
FIRST_PHASE = "rollout"
WAITED = "waited"
"""Seconds of each step in which the other run had its turn."""
TURN_SECONDS = 600
"""The longest wait for the other run of a pair: its start, or a step."""
Medians = dict[str, dict[str, float]]
"""Medians of a run, by clock (`seconds`, `processor`), then by phase."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="to compare with")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40, help=f"of each run; the first {WARM_UP_STEPS} are not counted")
    parser.add_argument("--manifest", type=Path, default=ROOT / "examples" / "quickstart.yaml")
    parser.add_argument("--threads", type=int, help="of trainers and engines: 1 where others use the machine too")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="of both jobs, as of `rljob run`")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return run_inside(json.loads(arguments.inside))
    pairs: list[tuple[Medians, Medians]] = []
    with tempfile.TemporaryDirectory(prefix="rljob-against-") as folder:
        other = unpacked(arguments.commit, Path(folder) / "other")
        python = {ROOT: sys.executable, other: interpreter(other, Path(folder) / "environment")}
        for number in range(arguments.pairs):
            # Who goes first changes from pair to pair.
            trees = [ROOT, other] if number % 2 else [other, ROOT]
            turns = [Path(folder) / f"turn-{number}-{place}" for place in range(2)]
            begin(turns)
            with ThreadPoolExecutor() as threads:
                runs = {
                    tree: threads.submit(run, tree, python[tree], arguments, own, turns[tree is trees[0]])
                    for tree, own in zip(trees, turns)
                }
                medians = {tree: of_run.result() for tree, of_run in runs.items()}
            pairs.append((medians[ROOT], medians[other]))
            print(json.dumps({"pair": number + 1, "this": medians[ROOT], "other": medians[other]}), flush=True)
    return report([*figures(pairs, arguments.commit)])


def figures(pairs: Sequence[tuple[Medians, Medians]], commit: str) -> Iterator[Figure]:
    """A row for each phase and clock; the limit is that of seconds."""
    rows = [("seconds", phase, f"{what}, seconds") for phase, what in (PHASES | {OTHER: OTHER}).items()]
    rows += [("processor", phase, f"{what}, processor seconds") for phase, what in PHASES.items()]
    for clock, phase, what in rows:
        ratios = [this[clock][phase] / other[clock][phase] for this, other in pairs]
        note = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} pairs"
        yield Figure(what, commit, statistics.median(ratios), LIMIT, at_most=True, note=note)


def unpacked(commit: str, folder: Path) -> Path:
    """The files of a commit, in a folder that is made."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


def interpreter(tree: Path, folder: Path) -> str:
    """Python with the packages of a tree's lock file: this one where it has them, else one that is made in `folder`."""
    lock = Path("requirements") / "cpu.txt"
    if (tree / lock).read_bytes() == (ROOT / lock).read_bytes():
        return sys.executable
    python = str(folder / "bin" / "python")
    uv = [str(Path(sys.executable).with_name("uv"))]
    install = [*uv, "pip", "install", "--quiet", "--python", python, "--no-deps"]
    for command in (
        [*uv, "venv", "--quiet", "--python", sys.executable, str(folder)],
        [*install, "--compile-bytecode", "--requirements", str(tree / lock)],
        [*install, "--no-build-isolation", "--editable", str(tree)],
    ):
        subprocess.run(command, check=True)
    return python


def begin(turns: Sequence[Path]) -> None:
    """Make the pipes in which each run of a pair finds its turns; the first has one."""
    for path in turns:
        os.mkfifo(path)
        # Never closed: what is in a pipe is gone where no process has it open.
        os.open(path, os.O_RDWR)
    give(turns[0])


def give(path: Path, count: int = 1) -> None:
    """Let the run with this pipe take `count` steps more."""
    pipe = os.open(path, os.O_RDWR)
    os.write(pipe, b"." * count)
    os.close(pipe)


def run(tree: Path, python: str, arguments: argparse.Namespace, own: Path, peer: Path) -> Medians:
    """Run the job with the code of `tree`, whose folders come before those that are installed; the medians of its
    phases. A step takes a turn out of `own` and puts one into `peer`."""
    try:
        return _run(tree, python, arguments, own, peer)
    finally:
        give(peer, arguments.steps)


def _run(tree: Path, python: str, arguments: argparse.Namespace, own: Path, peer: Path) -> Medians:
    output = own.with_name(f"run-{own.name}")
    settings = [f"spec.steps={arguments.steps}", *arguments.settings]
    if arguments.threads:
        settings.append(f"spec.resources.threadsPerDevice={arguments.threads}")
    order = {
        "manifest": str(arguments.manifest.resolve()),
        "settings": settings,
        "output": str(output),
        "turns": [str(own), str(peer)],
    }
    code = os.pathsep.join(str(tree / folder) for folder in ("crds", "operator", "worker"))
    ended = subprocess.run(
        [python, __file__, "-", "--inside", json.dumps(order)],
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
    records = [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]
    counted: dict[str, list[float]] = json.loads((output / "processor.json").read_text())
    steps: list[dict[str, float]] = []
    for record, waited in zip(records, counted.pop(WAITED), strict=True):
        outside = record["step_seconds"] - sum(record["phases"].values()) - waited
        steps.append(record["phases"] | {OTHER: outside})
    return {
        "seconds": {name: statistics.median(step[name] for step in steps[WARM_UP_STEPS:]) for name in (*PHASES, OTHER)},
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
    own, peer = map(Path, order["turns"])
    pipe = os.open(own, os.O_RDWR)

    @contextmanager
    def phase(clock: PhaseClock, name: str) -> Iterator[None]:
        if name == FIRST_PHASE:
            if counted:
                give(peer)
            began = time.perf_counter()
            take(pipe)
            counted.setdefault(WAITED, []).append(time.perf_counter() - began)
        if not processes:
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


def take(pipe: int) -> None:
    """Wait for a turn."""
    if not select.select([pipe], [], [], TURN_SECONDS)[0]:
        raise SystemExit(f"no turn in {TURN_SECONDS} s: the other run of the pair hangs")
    os.read(pipe, 1)


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
