"""`rljob replay`."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api.how_many import how_many
from rljob_worker.cli.manifest import folder_name, without_outlets
from rljob_worker.cli.trust import add_trust_argument, checkpoints_of, say
from rljob_worker.driver.stop import stopping_at_once

if TYPE_CHECKING:
    from rljob_api import RLJob
    from rljob_worker.driver.replay import Comparison, Plan

_DESCRIPTION = """Sample a step's responses again and compare them, token for token, with those that the run trained on.

The run must have kept a journal (spec.records.journal: true). The weights that sampled the step come from the newest
checkpoint before it; steps since then are trained again, on the samples of the journal, and what training says of them
is compared with their records. Exit code 1 where anything differs but the rounding of log-probabilities.

examples:
  rljob replay runs/try --step 12
  rljob replay runs/try --step 12 --output runs/try-12"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "replay",
        help="sample a step of a run again, and compare",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("folder", metavar="DIR", type=folder_name, help="the run folder")
    command.add_argument("--step", type=int, required=True, metavar="N", help="the step")
    add_trust_argument(command)
    command.add_argument(
        "--output",
        type=folder_name,
        metavar="DIR",
        help="folder of the replay's own logs (default: a temporary one, which stays where the replay fails)",
    )
    command.set_defaults(run=run)


@stopping_at_once()
def run(arguments: argparse.Namespace) -> int:
    """Replay the step."""
    from rich.console import Console

    from rljob_api.profiles.base import BACKEND_AUTOLOAD_VARIABLE
    from rljob_api.safe_text import visible
    from rljob_api.validation import ManifestError, check_runnable_locally
    from rljob_api.wire.exit_codes import ExitCode
    from rljob_worker.errors import UserError
    from rljob_worker.records.run_files import require_run_folder

    run_of = require_run_folder(arguments.folder)
    job = _job(run_of.job)
    try:
        check_runnable_locally(job)
    except ManifestError as error:
        raise UserError(f"replay runs on this machine alone: {error}") from None
    os.environ[BACKEND_AUTOLOAD_VARIABLE] = "0"
    # Importing the worker takes seconds.
    from rljob_worker.cli.progress import RunProgress
    from rljob_worker.driver.loops.replay import ReplayLoop
    from rljob_worker.driver.replay import Comparison, plan_replay
    from rljob_worker.driver.run import run_job

    checkpoints = checkpoints_of(arguments.folder, run_of.spec, arguments.trust_unverified)
    plan = plan_replay(arguments.folder, checkpoints, arguments.step)
    if plan.begins_with is not None:
        say(plan.begins_with)
    comparison = Comparison()
    output = arguments.output or Path(tempfile.mkdtemp(prefix="rljob-replay-"))
    with RunProgress(Console(stderr=False), len(plan.trained)) as progress:
        outcome = run_job(
            without_outlets(job),
            output,
            resume=False,
            on_record=lambda record: None,
            on_event=progress.event,
            loop=lambda given: ReplayLoop(given, plan, comparison),
        )
    if outcome.exit_code != ExitCode.OK:
        print(visible(f"logs    {output}\n{outcome.outcome}: {outcome.message}"))
        return outcome.exit_code
    print(visible(_told(plan, comparison)))
    if arguments.output is None:
        shutil.rmtree(output, ignore_errors=True)
    return ExitCode.OK if comparison.whole else ExitCode.FAILED


def _job(manifest: object) -> RLJob:
    from pydantic import ValidationError

    from rljob_api import RLJob
    from rljob_worker.errors import UserError

    try:
        return RLJob.model_validate(manifest)
    except ValidationError as error:
        raise UserError(f"run.json: the job in it is not one of this version of RLJob: {error}") from None


def _told(plan: Plan, found: Comparison) -> str:
    from rljob_api.safe_text import visible_line

    step, versions = plan.step, plan.step.versions
    samples = sum(len(one.episodes) for one in step.groups)
    weights = f"weights {versions[0]}" if len(versions) == 1 else f"weights {versions[0]} to {versions[-1]}"
    begun = f"the checkpoint of step {plan.start}" if plan.start else "the starting weights"
    lines = [
        f"step {step.number}: {how_many(len(step.groups), 'prompt')}, {how_many(samples, 'sample')}, of {weights}; "
        f"from {begun}"
    ]
    if plan.trained:
        total = found.metrics + len(found.other_metrics)
        trained = how_many(len(plan.trained), "step")
        lines.append(f"trained again: {trained}; {found.metrics} of {total} metrics as in the records")
        lines += [f"  {visible_line(one)}" for one in found.other_metrics[:5]]
    lines += map(visible_line, plan.changes)
    lines.append(f"sampled again: {found.equal} of {found.tokens} tokens are the same")
    lines += [f"  first other one: {visible_line(found.first)}"] if found.first else []
    lines.append(
        f"log-probabilities: {found.same_log_probs} of {found.equal} to the bit, largest difference {found.largest:.1e}"
    )
    return "\n".join(lines)
