"""`rljob score`."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.how_many import how_many
from rljob_worker.cli.manifest import add_manifest_arguments, file_name, read_manifest
from rljob_worker.cli.response_rows import read_rows
from rljob_worker.errors import UserError

if TYPE_CHECKING:
    from rljob_api.spec import RewardSpec, RLJobSpec
    from rljob_worker.cli.score_responses import ResponseSet
    from rljob_worker.rewards.trial import Tally

_DESCRIPTION = """Try a job's rewards before it takes a device: score the data's own labels as if the policy had
answered them, or the responses of a trajectory file. Rewards run as in a run: in the same processes, with the same
time-outs, memory, environment and network. No Ray, engine or trainer is started.

Shown are, for each source and evaluation set, the distribution of the scores and of a reward's parts, the errors with
file and row, and the seconds. A right answer that does not get the highest score is a wrong reward, or a wrong label.

Exit code 1 where nothing could be scored, or a limit is passed that --min-mean or --max-errors gives.

examples:
  rljob score job.yaml
  rljob score job.yaml --rows 1000 --min-mean 0.99 --max-errors 0
  rljob score job.yaml --responses runs/try/trajectories/step-000012.jsonl.gz"""
_SHOWN = 10
"""Errors of a set that are printed; --json has all."""
_BAR = 30


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "score",
        help="try a job's rewards, without a run",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_manifest_arguments(command)
    responses = command.add_mutually_exclusive_group()
    responses.add_argument(
        "--responses",
        type=file_name,
        metavar="FILE",
        help="score those of a trajectory file, or of any JSONL file with prompt_uid and response",
    )
    responses.add_argument("--labels", action="store_true", help="score the data's labels (the default)")
    command.add_argument("--rows", type=_rows, metavar="N", help="the first N of each source, or of the file")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    command.add_argument("--min-mean", type=_finite, metavar="X", help="exit code 1 where the mean of a set is lower")
    command.add_argument("--max-errors", type=_count, metavar="N", help="exit code 1 where there are more errors")
    command.set_defaults(run=run)


def _rows(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows; use 1 or more")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of errors; use 0 or more")
    return int(text)


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Score, and show what came of it."""
    from rljob_api.profiles.base import BACKEND_AUTOLOAD_VARIABLE
    from rljob_api.safe_text import visible
    from rljob_api.wire.exit_codes import ExitCode

    job = read_manifest(arguments)
    if arguments.responses is not None and next(read_rows(arguments.responses), None) is None:
        raise UserError(f"--responses: {arguments.responses} has no responses")
    # transformers imports torch, which would ask for a device that is not used.
    os.environ[BACKEND_AUTOLOAD_VARIABLE] = "0"
    found = _score(job.spec, arguments.responses, arguments.rows)
    failures = _failures(found, arguments.min_mean, arguments.max_errors)
    if arguments.json:
        sets = [as_json(one, tally, _reward(job.spec, one)) for one, tally in found]
        print(json.dumps({"sets": sets, "failures": failures}, indent=2))
    else:
        for one, tally in found:
            print(visible("\n".join(as_text(one, tally, _reward(job.spec, one)))))
        for failure in failures:
            print(visible(f"failed: {failure}"))
    return ExitCode.FAILED if failures else ExitCode.OK


def _score(spec: RLJobSpec, file: Path | None, rows: int | None) -> list[tuple[ResponseSet, Tally]]:
    from rich.console import Console

    from rljob_api.safe_text import visible_line
    from rljob_worker.waiting import waiting_for

    with waiting_for("transformers to be imported"):
        from rljob_worker.cli.counted_progress import CountedProgress
        from rljob_worker.cli.score_responses import Data
        from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
        from rljob_worker.driver.preflight import apply_environment
        from rljob_worker.rewards.runner import RewardRunner
        from rljob_worker.rewards.scorers import Scorers
        from rljob_worker.rewards.trial import never_failing, score_all

    apply_environment(spec)
    counted = never_failing(spec)
    with tempfile.TemporaryDirectory(prefix="rljob-score-") as folder:
        with waiting_for("the tokenizer of spec.model"):
            tokenizer = load_tokenizer(prepare_tokenizer(counted, Path(folder)))
        with waiting_for("the rows of spec.data and spec.evaluation to be read"):
            data = Data(counted, tokenizer)
            sets = data.labels(rows) if file is None else data.responses(file, rows)
        if not sets:
            raise UserError(
                "spec.data.labelKey: null, so there are no labels to score: name a file of responses with --responses"
            )
        for loaded in data.without_labels() if file is None else []:
            print(visible_line(f"rljob: {loaded.field} ({loaded.name}): left out: labelKey is null"), file=sys.stderr)
        with waiting_for("spec.reward to be imported and tried"):
            runner = RewardRunner(Scorers(counted, tokenizer, columns=data.training.columns(), routed=data.routed))
        with runner, CountedProgress(Console(stderr=True)) as progress:
            found = []
            for one in sets:
                progress.begin(f"{one.source.field} ({one.source.name})", one.count)
                found.append((one, score_all(runner, one.candidates, progress.advance)))
            return found


def _reward(spec: RLJobSpec, one: ResponseSet) -> RewardSpec:
    """The reward as the manifest has it."""
    from rljob_worker.data.sources import data_sources, evaluation_sources

    sources = dict(data_sources(spec) + evaluation_sources(spec))
    reward = sources[one.source.field].reward or spec.reward
    assert reward is not None
    return reward


def _failures(found: list[tuple[ResponseSet, Tally]], min_mean: float | None, max_errors: int | None) -> list[str]:
    """Results that make the exit code 1."""
    from rljob_worker.rewards.trial import Distribution

    failures = []
    for one, tally in found:
        name = f"{one.source.field} ({one.source.name})"
        if not tally.scores:
            failures.append(f"{name}: nothing could be scored")
        elif min_mean is not None and (mean := Distribution.of(tally.scores).mean) < min_mean:
            failures.append(f"{name}: the mean is {mean:.6g}, below --min-mean {min_mean:g}")
        if max_errors is not None and len(tally.errors) > max_errors:
            failures.append(f"{name}: {how_many(len(tally.errors), 'error')}, more than --max-errors {max_errors}")
    return failures


def as_json(one: ResponseSet, tally: Tally, reward: RewardSpec) -> dict[str, Any]:
    """A set's results as a JSON value."""
    from dataclasses import asdict

    from rljob_worker.rewards.trial import Distribution

    parts = {name: asdict(Distribution.of(values)) for name, values in tally.parts.items()}
    return {
        "field": one.source.field,
        "name": one.source.name,
        "data": one.source.origin,
        "responses": one.count,
        "seconds": round(tally.seconds, 3),
        "scores": asdict(Distribution.of(tally.scores)) if tally.scores else None,
        "distribution": [asdict(count) for count in tally.counts()],
        "parts": parts,
        "onError": reward.on_error,
        "errorScore": reward.error_score,
        "errors": [{"place": place, "error": error} for place, error in tally.errors],
        "compared": tally.compared,
        "other": [{"place": place, "recorded": before, "score": now} for place, before, now in tally.other],
    }


def as_text(one: ResponseSet, tally: Tally, reward: RewardSpec) -> list[str]:
    """A set's results as lines; text of strangers stays inside its line."""
    from rljob_api.safe_text import visible_line
    from rljob_worker.rewards.trial import Distribution

    speed = f", {one.count / tally.seconds:.0f} a second" if tally.seconds > 0 else ""
    lines = [
        visible_line(
            f"{one.source.field} ({one.source.name}): {how_many(one.count, 'response')} of {one.source.origin}"
        ),
        f"  scored {len(tally.scores)}  errors {len(tally.errors)}  in {tally.seconds:.1f} s{speed}",
    ]
    if tally.scores:
        lines.append(f"  score  {_numbers(Distribution.of(tally.scores))}")
        counts = tally.counts()
        most = max(count.count for count in counts)
        for count in counts:
            value = f"{count.low:.6g}" if count.low == count.high else f"{count.low:.4g} to {count.high:.4g}"
            bar = "#" * math.ceil(_BAR * count.count / most)
            lines.append(f"  {value:>20} {count.count:>8}  {bar}")
    for name, values in sorted(tally.parts.items()):
        lines.append(
            visible_line(f"  part {name}  {how_many(len(values), 'value')}  {_numbers(Distribution.of(values))}")
        )
    if tally.compared:
        lines.append(f"  as recorded in the run: {tally.compared - len(tally.other)} of {tally.compared}")
    for place, before, now in tally.other[:_SHOWN]:
        lines.append(visible_line(f"  {place}: {before:.6g} in the run, {now:.6g} now"))
    if tally.errors:
        lines.append(f"  {_meaning(reward, len(tally.errors))}")
    for place, error in tally.errors[:_SHOWN]:
        lines.append(visible_line(f"  {place}: {error}"))
    if len(tally.errors) > _SHOWN:
        lines.append(f"  and {len(tally.errors) - _SHOWN} more (--json has all)")
    return lines


def _numbers(found: Any) -> str:
    return f"mean {found.mean:.6g}  std {found.deviation:.4g}  min {found.least:.6g}  max {found.most:.6g}"


def _meaning(reward: RewardSpec, errors: int) -> str:
    if reward.on_error == "Fail":
        return f"onError: Fail: in a run the first of these {errors} ends the job"
    return f"onError: Score: in a run each of these {errors} gets errorScore {reward.error_score:g}"
