"""`rljob run`."""

from __future__ import annotations

import argparse
import logging
import os
import re
import time
from pathlib import Path

from rljob_api import RLJob
from rljob_api.profiles.base import BACKEND_AUTOLOAD_VARIABLE
from rljob_api.safe_text import visible, visible_block
from rljob_api.validation import ManifestError, check_runnable_locally
from rljob_api.wire.exit_codes import ExitCode
from rljob_worker.cli.addresses import check_ray_address
from rljob_worker.cli.halves import add_half_arguments, check_half, half_inputs, half_job, half_run
from rljob_worker.cli.manifest import add_manifest_arguments, folder_name, read_manifest
from rljob_worker.cli.sweep import add_sweep_argument, run_sweep, without_rows
from rljob_worker.cli.trust import add_trust_argument, trusting
from rljob_worker.driver.stop import stopping_at_once
from rljob_worker.errors import UserError
from rljob_worker.host.files import keep_output_from_raising
from rljob_worker.waiting import waiting_for

logger = logging.getLogger(__name__)

_DESCRIPTION = """Run a job on this machine: embedded Ray, real Megatron, real vLLM, the devices of spec.resources.
With --address, or inside a Ray job, it runs on the nodes of that Ray cluster instead.

The run folder holds run.json, steps.jsonl (one record a step), trajectories/, tensorboard/, checkpoints/, logs/,
events.jsonl, summary.json, report.html and report.png.

examples:
  rljob run job.yaml
  rljob run job.yaml --set spec.steps=5 --output runs/try
  rljob run job.yaml --sweep spec.training.optimizer.lr=1e-6,3e-6 --output runs/lr
  rljob run job.yaml --output runs/try --resume
  rljob run - --output /shared/try --resume auto < job.yaml
  rljob run job.yaml --only rollout --output runs/sampled
  rljob run job.yaml --only train --from runs/sampled"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "run", help="run a job here", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_manifest_arguments(command)
    command.add_argument("--output", type=folder_name, metavar="DIR", help="run folder (default: runs/NAME-DATE-TIME)")
    command.add_argument(
        "--resume",
        nargs="?",
        const="always",
        choices=["always", "auto"],
        help="continue the run in --output from its newest checkpoint; `auto`: if it holds this job's run, else begin",
    )
    add_trust_argument(command)
    command.add_argument(
        "--skip-prompt",
        action="append",
        default=[],
        type=_row,
        metavar="ROW",
        help="leave a row of the data out, by its number or NAME/NUMBER (spec.data.skip; may be given several times)",
    )
    command.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="Ray cluster to run on (default: RAY_ADDRESS; `local`: none but the embedded one)",
    )
    add_sweep_argument(command)
    add_half_arguments(command)
    command.add_argument(
        "--no-report", action="store_true", help="draw no report at the end (`rljob report DIR` draws it later)"
    )
    command.set_defaults(run=run)


@stopping_at_once()
def run(arguments: argparse.Namespace) -> int:
    """Run the job and draw its report."""
    if arguments.resume and arguments.output is None:
        raise UserError("--resume: needs --output with the run folder to continue")
    if arguments.trust_unverified and not (arguments.resume or arguments.checkpoint):
        raise UserError("--trust-unverified: needs --resume; a new run reads no checkpoint")
    if arguments.sweep:
        return run_sweep(arguments, _look)
    check_half(arguments)
    job = without_rows(read_manifest(arguments), arguments.skip_prompt)
    if arguments.only:
        job = half_job(arguments, job)
    if arguments.trust_unverified:
        job = trusting(job)
    # Not before the manifest was read: numpy and rich take a third of the time.
    from rich.console import Console

    keep_output_from_raising()
    console = Console(stderr=False)
    output = arguments.output or Path("runs") / f"{job.metadata.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    address = _look(arguments, job, output)
    half = half_inputs(arguments) if arguments.only else None
    # Importing the worker takes seconds: a wrong manifest should not have to wait for it.
    with waiting_for("torch, transformers, Ray and vLLM to be imported"):
        from rljob_worker.cli.progress import RunProgress
        from rljob_worker.driver.run import run_job

    own = {} if half is None else half_run(half, arguments.steps)
    with RunProgress(console, job.spec.steps if half is None else half.last_step(arguments.steps or 1)) as progress:
        outcome = run_job(
            job,
            output,
            resume="auto" if arguments.resume == "auto" else arguments.resume is not None,
            address=address,
            on_record=progress.record,
            on_event=progress.event,
            **own,
        )
    # The steps of a run that could not be continued are those of the attempts before, and were shown then.
    shown = progress.executed or outcome.exit_code == ExitCode.OK
    said = [*(_report(output, not arguments.no_report) if shown else []), f"run     {output}"]
    result = visible_block(f"{outcome.outcome}: {outcome.message}", "  ")
    # Of a job that failed on a cluster, people see the log's last line first.
    said = [result, *said] if outcome.exit_code == ExitCode.OK else [*said, result]
    console.print(visible("\n".join(said)), highlight=False, markup=False, soft_wrap=True)
    return outcome.exit_code


def _look(arguments: argparse.Namespace, job: RLJob, output: Path) -> str | None:
    """Refuse a wrong job before anything is imported; return the address of the Ray cluster, None: the embedded one.

    Raises:
        UserError: naming field or option.
    """
    from rljob_worker.cli.first_look import look_first

    address: str | None = arguments.address or os.environ.get("RAY_ADDRESS")
    if address in (None, "", "local"):
        address = None
        try:
            check_runnable_locally(job)
        except ManifestError as error:
            raise UserError(str(error)) from None
    # The driver uses no device: what one lacks is to be said in words, not by torch_npu's traceback.
    os.environ[BACKEND_AUTOLOAD_VARIABLE] = "0"
    look_first(job, output, arguments.resume, on_this_machine=address is None)
    if address is not None:
        check_ray_address("--address" if arguments.address else "RAY_ADDRESS", address)
    return address


def _row(text: str) -> int | str:
    if not re.fullmatch(r"(.*/)?[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no row: a number from 0, or NAME/NUMBER as messages have it")
    return int(text) if text.isdecimal() else text


def _report(output: Path, drawn: bool) -> list[str]:
    """The table of phases, and the report drawn; how the job ended stands already, whatever happens here."""
    try:
        from rljob_worker.records.steps import read_steps
        from rljob_worker.report.build import build_report
        from rljob_worker.report.table import phase_table_text

        if not read_steps(output):
            return []
        if not drawn:
            return [phase_table_text(output)]
        html, png = build_report(output)
        return [phase_table_text(output), f"report  {html}\n        {png}"]
    except Exception as error:
        logger.debug("no report", exc_info=error)
        return [f"report  cannot be drawn: {error}; `rljob report {output}` tries again"]
