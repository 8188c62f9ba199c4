"""`rljob run --sweep PATH=V1,V2`: a run for each value, one after the other, and a table of them."""

from __future__ import annotations

import argparse
import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rljob_api import RLJob
from rljob_worker.cli.manifest import read_manifest
from rljob_worker.errors import JobError, UserError

_MOST_RUNS = 64
_BRACKETS = {"[": "]", "{": "}"}
_QUOTES = "\"'"


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep."""

    values: tuple[str, ...]
    """`PATH=VALUE` of each option."""
    folder: Path


def add_sweep_argument(command: argparse.ArgumentParser) -> None:
    """Add the option."""
    command.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="PATH=V1,V2",
        help="a run for each of these values of a field, one after the other (given several times: for each "
        "combination); --output is then the folder of their run folders",
    )


def run_sweep(arguments: argparse.Namespace, look: Callable[[argparse.Namespace, RLJob, Path], object]) -> int:
    """Run them, and show a table; exit code 1 where one of them did not succeed.

    Args:
        arguments: of `rljob run`.
        look: refuses a wrong job, or run folder, before anything is imported.

    Raises:
        UserError: a value is wrong in one of them; none was started.
    """
    from rljob_api.wire.exit_codes import ExitCode

    if arguments.only:
        raise UserError("--sweep: whole runs alone; leave --only out")
    if arguments.manifest == "-":
        raise UserError("--sweep: reads the manifest once for each run; name a file, not -")
    if arguments.resume == "always":
        raise UserError("--resume: with --sweep `--resume auto` continues the runs that were begun")
    job = read_manifest(arguments)
    output = arguments.output or Path("runs") / f"{job.metadata.name}-sweep-{time.strftime('%Y%m%d-%H%M%S')}"
    runs = planned(arguments.sweep, output)
    _refuse_equal([(one, _checked(arguments, one, look)) for one in runs])
    codes = []
    for number, one in enumerate(runs, start=1):
        print(f"run {number} of {len(runs)}: {' '.join(one.values)}", flush=True)
        codes.append(run_to_its_end(_command(arguments, one)))
        if codes[-1] in (ExitCode.INTERRUPTED, ExitCode.STOPPED):
            break
    from rljob_api.safe_text import visible

    print(visible(table_text(runs, codes)))
    if codes[-1] in (ExitCode.INTERRUPTED, ExitCode.STOPPED):
        return codes[-1]
    return ExitCode.FAILED if any(codes) else ExitCode.OK


def run_to_its_end(command: Sequence[str]) -> int:
    """Exit code of a command, which gets the stop signals of this process and is waited for: it saves its state."""
    process = subprocess.Popen(command, start_new_session=True)
    kept = {
        number: signal.signal(number, lambda received, _: process.send_signal(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        return process.wait()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def planned(sweeps: Sequence[str], output: Path) -> list[SweepRun]:
    """The runs of all combinations of values, each with a folder of its own.

    Raises:
        UserError: an option is none, or there are too many combinations.
    """
    options = [list(_options(sweep)) for sweep in sweeps]
    paths = [sweep.partition("=")[0] for sweep in sweeps]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise UserError(f"--sweep: {twice} is given twice; name all of its values in one option")
    count = 1
    for of_one in options:
        count *= len(of_one)
    if count > _MOST_RUNS:
        raise UserError(f"--sweep: {count} combinations; at most {_MOST_RUNS}")
    runs = []
    for number, values in enumerate(itertools.product(*options), start=1):
        name = "-".join(_slug(value) for value in values)[:100]
        runs.append(SweepRun(values, output / f"{number:02d}-{name}"))
    return runs


def _options(sweep: str) -> Iterator[str]:
    path, equals, values = sweep.partition("=")
    found = list(_split(values))
    if not equals or not path or not all(found):
        raise UserError(f"--sweep: {sweep!r} is not PATH=V1,V2, like spec.training.optimizer.lr=1e-6,3e-6")
    if len(set(found)) != len(found):
        raise UserError(f"--sweep: {sweep!r} has a value twice")
    return (f"{path}={value}" for value in found)


def _split(values: str) -> Iterator[str]:
    """The values between commas that stand in no brackets and no quotation marks."""
    open_, quote, start = list[str](), "", 0
    for place, character in enumerate(values):
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in _BRACKETS:
            open_.append(_BRACKETS[character])
        elif open_ and character == open_[-1]:
            open_.pop()
        elif character == "," and not open_:
            yield values[start:place].strip()
            start = place + 1
    yield values[start:].strip()


def _slug(value: str) -> str:
    path, _, given = value.partition("=")
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", f"{path.rsplit('.', 1)[-1]}_{given}").strip("_")


def without_rows(job: RLJob, rows: Sequence[int | str]) -> RLJob:
    """The job without these rows of its data."""
    data = job.spec.data.model_copy(update={"skip": list(dict.fromkeys([*job.spec.data.skip, *rows]))})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"data": data})}) if rows else job


def _checked(
    arguments: argparse.Namespace, one: SweepRun, look: Callable[[argparse.Namespace, RLJob, Path], object]
) -> RLJob:
    own = argparse.Namespace(**vars(arguments) | {"overrides": [*arguments.overrides, *one.values]})
    try:
        job = without_rows(read_manifest(own), arguments.skip_prompt)
        look(own, job, one.folder)
    except UserError as error:
        raise UserError(f"--sweep: with {' '.join(one.values)}: {error}") from None
    if one.folder.exists() and any(one.folder.iterdir()) and not arguments.resume:
        raise UserError(f"--sweep: {one.folder} holds a run; name another --output, or add --resume auto")
    return job


def _refuse_equal(jobs: Sequence[tuple[SweepRun, RLJob]]) -> None:
    """One value in two spellings would be run twice."""
    for (one, job), (other, same) in itertools.combinations(jobs, 2):
        if job == same:
            raise UserError(f"--sweep: {' '.join(one.values)} and {' '.join(other.values)} are the same job")


def _command(arguments: argparse.Namespace, one: SweepRun) -> list[str]:
    command = [sys.executable, "-m", "rljob_worker.cli.main", "run", arguments.manifest, "--output", str(one.folder)]
    for value in (*arguments.overrides, *one.values):
        command += ["--set", value]
    for row in arguments.skip_prompt:
        command += ["--skip-prompt", str(row)]
    command += ["--resume", "auto"] if arguments.resume else []
    command += ["--address", arguments.address] if arguments.address else []
    return command + (["--no-report"] if arguments.no_report else [])


def table_text(runs: Sequence[SweepRun], codes: Sequence[int]) -> str:
    """A line for each run: values, exit code, steps, seconds, and the last step's mean reward and evaluations."""
    from rljob_worker.records.steps import effective_steps, read_steps
    from rljob_worker.report.text import aligned

    rows: list[list[str]] = []
    evaluated: list[str] = []
    damaged: list[str] = []
    for number, one in enumerate(runs):
        try:
            records = list(effective_steps(read_steps(one.folder)))
        except JobError as error:
            # The other runs have a row all the same.
            records, damaged = [], [*damaged, str(error)]
        last: dict[str, float | None] = {}
        for record in records:
            last |= record.metrics
        evaluated += [name for name in last if re.fullmatch(r"eval/[^/]+", name) and name not in evaluated]
        values = {name: _number(last.get(name)) for name in ("rollout/raw_reward", *evaluated)}
        state = {0: "done"}.get(codes[number], f"exit {codes[number]}") if number < len(codes) else "not run"
        seconds = sum(record.step_seconds for record in records)
        rows.append(
            [
                " ".join(one.values),
                state,
                str(sum(record.step > 0 for record in records)),
                f"{seconds:.1f}",
                *values.values(),
            ]
        )
    head = ["run", "state", "steps", "seconds", "reward", *evaluated]
    lines = aligned(head, [row + ["-"] * (len(head) - len(row)) for row in rows])
    return "\n".join([*lines, *damaged, f"runs    {runs[0].folder.parent}"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
