"""`rljob run --only rollout` and `--only train`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rljob_worker.cli.manifest import folder_name, without_outlets
from rljob_worker.cli.named_checkpoint import named_checkpoint
from rljob_worker.errors import UserError

if TYPE_CHECKING:
    from rljob_api import RLJob
    from rljob_worker.checkpoints.half_journal import HalfJournal
    from rljob_worker.checkpoints.reader import Found


def add_half_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.add_argument(
        "--only",
        choices=["rollout", "train"],
        help="one half of a step: `rollout` samples and scores into the journal of --output, `train` trains on that of "
        "--from; for one step the two give the bits of the whole",
    )
    command.add_argument(
        "--steps",
        type=_steps,
        metavar="N",
        help="with --only rollout: N steps, all under the same weights (default: 1)",
    )
    command.add_argument(
        "--from",
        dest="journal",
        type=folder_name,
        metavar="DIR",
        help="with --only train: run folder of --only rollout",
    )
    command.add_argument(
        "--checkpoint",
        type=folder_name,
        metavar="DIR",
        help="with --only: begin with the newest checkpoint of this run folder, or with one of its checkpoints/step-N, "
        "not with the starting weights",
    )


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps; use 1 or more")
    return int(text)


def check_half(arguments: argparse.Namespace) -> None:
    """UserError where options do not go together."""
    only = arguments.only
    for name, given, wanted in (
        ("--steps", arguments.steps is not None, only == "rollout"),
        ("--from", arguments.journal is not None, only == "train"),
        ("--checkpoint", arguments.checkpoint is not None, only is not None),
    ):
        if given and not wanted:
            raise UserError(f"{name}: only with --only {'train' if name == '--from' else 'rollout'}")
    if only and arguments.resume:
        raise UserError("--resume: a half of a run is not continued; --checkpoint names what it begins with")
    if only == "train" and arguments.journal is None:
        raise UserError("--only train: needs --from with the run folder of --only rollout")


def half_job(arguments: argparse.Namespace, job: RLJob) -> RLJob:
    """The job as a half runs it: with a journal, or with checkpoints in its own folder.

    Raises:
        UserError: its steps cannot be sampled one by one.
    """
    from rljob_api import derived
    from rljob_api.spec import Mode

    spec = job.spec
    if arguments.only == "rollout":
        if (judge := derived.judge_model(spec)) is not None:
            raise UserError(
                f"spec.judges: {judge.name} is a model of the job's own, which --only rollout does not run; give it an "
                "endpoint, or leave it out"
            )
        if spec.mode is Mode.ASYNC:
            raise UserError(
                "spec.mode: Async samples steps across each other; --set spec.mode=Colocated has them apart"
            )
        for field, given in (("partial", spec.rollout.partial), ("tail", spec.rollout.tail)):
            if given is not None:
                raise UserError(
                    f"spec.rollout.{field}: carries groups from step to step; --only rollout has no later one"
                )
    job = without_outlets(job)
    records = job.spec.records.model_copy(update={"journal": arguments.only == "rollout"})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"records": records})})


@dataclass(frozen=True, slots=True)
class HalfInputs:
    """Input of a half of a step, read before anything is imported that takes seconds."""

    found: Found | None
    """The checkpoint; None: the starting weights."""
    half: HalfJournal | None
    """The samples that are trained on."""

    def last_step(self, sampled: int) -> int:
        """The number of the half's last step, where `sampled` are asked for or all of the samples are trained on."""
        begins_after = 0 if self.found is None else self.found.state.step
        return begins_after + (sampled if self.half is None else len(self.half.steps))


def half_inputs(arguments: argparse.Namespace) -> HalfInputs:
    """Read them. Raises UserError where there are none, or they are damaged."""
    from rljob_worker.checkpoints.half_journal import read_half

    found = None
    if arguments.checkpoint is not None:
        found = named_checkpoint(arguments.checkpoint, None, arguments.trust_unverified).found
    return HalfInputs(found, read_half(arguments.journal) if arguments.only == "train" else None)


def half_run(given: HalfInputs, steps: int | None) -> dict[str, Any]:
    """Arguments of `run_job`: the loop, what is checked before the start, and whether trainers are needed."""
    from rljob_worker.driver.loops.halves import SamplingLoop, TrainingLoop, check_half

    found, half = given.found, given.half
    if half is None:
        return {"loop": lambda job: SamplingLoop(job, found, steps or 1), "engines_alone": found is None}
    return {
        "loop": lambda job: TrainingLoop(job, found, half),
        "check": lambda spec, inputs: check_half(half, found, spec, inputs),
    }
