"""`rljob eval`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_worker.cli.manifest import add_manifest_arguments, folder_name, read_manifest, without_outlets
from rljob_worker.cli.named_checkpoint import is_run, named_checkpoint
from rljob_worker.cli.trust import add_trust_argument
from rljob_worker.driver.stop import stopping_at_once
from rljob_worker.errors import UserError, no_folder

if TYPE_CHECKING:
    from rljob_api import RLJob

_DESCRIPTION = """Evaluate weights on the held-out data of a job (spec.evaluation), on its engines alone: no trainer is
started and nothing is trained. Prompts, seeds, sampling, rewards and their bounds are those of an evaluation in a run,
so that a checkpoint gets the scores that its run recorded at that step.

Weights are those of a run's checkpoint, of a model folder, or else those that spec.model begins with. The folder
of the results holds evaluation.json, trajectories/ (a row for each response; `rljob samples DIR` shows them) and
report.html.

examples:
  rljob eval job.yaml
  rljob eval job.yaml --checkpoint runs/try --step 40
  rljob eval job.yaml --model /models/Qwen3-4B --set spec.evaluation.samplesPerPrompt=8"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "eval",
        help="evaluate weights on the held-out data, without training",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_manifest_arguments(command)
    weights = command.add_mutually_exclusive_group()
    weights.add_argument(
        "--checkpoint",
        type=folder_name,
        metavar="DIR",
        help="a run folder (its newest checkpoint), or one of its checkpoints/step-N",
    )
    weights.add_argument("--model", type=folder_name, metavar="FOLDER", help="a Hugging Face folder with weights")
    command.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step of the run in --checkpoint")
    add_trust_argument(command)
    command.add_argument(
        "--output", type=folder_name, metavar="DIR", help="folder of the results (default: runs/NAME-eval-DATE-TIME)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    command.add_argument(
        "--no-report", action="store_true", help="write no report.html (`rljob report DIR` does later)"
    )
    command.set_defaults(run=run)


@stopping_at_once()
def run(arguments: argparse.Namespace) -> int:
    """Evaluate, and show what came of it."""
    from rljob_api.profiles.base import BACKEND_AUTOLOAD_VARIABLE
    from rljob_api.safe_text import visible, visible_block
    from rljob_api.wire.exit_codes import ExitCode

    job = without_outlets(_evaluated(read_manifest(arguments)))
    output = arguments.output or Path("runs") / f"{job.metadata.name}-eval-{time.strftime('%Y%m%d-%H%M%S')}"
    os.environ[BACKEND_AUTOLOAD_VARIABLE] = "0"
    with ExitStack() as stack:
        job, weights = _with_weights(job, arguments, output, stack)
        # Importing the worker takes seconds.
        from rljob_worker.driver.loops.evaluation import EvaluationLoop
        from rljob_worker.driver.run import run_job

        outcome = run_job(
            job,
            output,
            resume=False,
            on_record=lambda record: None,
            on_event=lambda said: print(visible_block(f"rljob: {said}", "  "), file=sys.stderr),
            loop=EvaluationLoop,
            engines_alone=True,
        )
    if outcome.exit_code != ExitCode.OK:
        print(visible(f"logs    {output}\n{outcome.outcome}: {outcome.message}"), file=sys.stderr)
        return outcome.exit_code
    _show(output, weights, arguments)
    return ExitCode.OK


def _show(output: Path, weights: str, arguments: argparse.Namespace) -> None:
    from rljob_api.safe_text import visible
    from rljob_worker.report.evaluation import (
        evaluation_of,
        evaluation_text,
        write_evaluation,
        write_evaluation_page,
    )

    evaluation = evaluation_of(output, weights)
    write_evaluation(output, evaluation)
    page = None if arguments.no_report else write_evaluation_page(output)
    if arguments.json:
        print(json.dumps(evaluation.to_json() | {"folder": str(output)}, indent=2))
        return
    print(evaluation_text(evaluation))
    print(visible("\n".join([*([f"report  {page}"] if page else []), f"run     {output}"])))


def _evaluated(job: RLJob) -> RLJob:
    """The job; UserError where there is nothing to evaluate it on, or it does not run on this machine alone."""
    from rljob_api.validation import ManifestError, check_runnable_locally

    if job.spec.evaluation is None:
        raise UserError(
            "spec.evaluation: the job has no held-out data to evaluate on; needed is evaluation.data or "
            "evaluation.sets, which --set can give too: --set spec.evaluation.data.path=FILE"
        )
    try:
        check_runnable_locally(job)
    except ManifestError as error:
        raise UserError(f"eval runs on this machine alone: {error}") from None
    return job


def _with_weights(job: RLJob, arguments: argparse.Namespace, output: Path, stack: ExitStack) -> tuple[RLJob, str]:
    """The job with the weights that were asked for, and their name; what is made for it goes with `stack`."""
    from rljob_worker.waiting import waiting_for

    if arguments.checkpoint is None and (arguments.step is not None or arguments.trust_unverified):
        option = "--step" if arguments.step is not None else "--trust-unverified"
        raise UserError(f"{option}: needs --checkpoint with the run folder")
    if arguments.model is not None:
        job = _of_model(job, _model_folder(arguments.model))
    if arguments.checkpoint is None:
        _look(job, output, model=True)
        model = job.spec.model
        return job, str(model.path) if model.path else "of spec.model.random"
    _look(job, output, model=False)
    named = named_checkpoint(arguments.checkpoint, arguments.step, arguments.trust_unverified)
    found = named.found
    output.parent.mkdir(parents=True, exist_ok=True)
    made = stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{output.name}-weights-", dir=output.parent))
    with waiting_for(f"the weights of step {found.state.step} to be written for the engines"):
        from rljob_worker.cli.export import export_found

        export_found(found, named.run_folder, named.spec, Path(made))
    return _of_model(job, Path(made)), f"{found.folder} (step {found.state.step})"


def _look(job: RLJob, output: Path, *, model: bool) -> None:
    from rljob_worker.cli.first_look import look_first
    from rljob_worker.waiting import waiting_for

    with waiting_for("torch, transformers, Ray and vLLM to be imported"):
        from rljob_worker.cluster.placement import engines_alone

    look_first(job, output, None, on_this_machine=True, model=model, groups=engines_alone(job.spec))


def _of_model(job: RLJob, folder: Path) -> RLJob:
    model = job.spec.model.model_copy(update={"path": str(folder.absolute()), "random": None, "revision": None})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"model": model})})


def _model_folder(folder: Path) -> Path:
    from rljob_worker.checkpoints.state import META

    if not folder.is_dir():
        raise UserError(f"--model: {no_folder(folder)}; needed is one with config.json and *.safetensors")
    if (folder / META).is_file() or is_run(folder):
        raise UserError(f"--model: {folder} is of a run and holds no exported weights; use --checkpoint {folder}")
    return folder
