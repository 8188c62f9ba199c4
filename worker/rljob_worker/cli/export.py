"""`rljob export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_worker.cli.manifest import folder_name
from rljob_worker.cli.trust import add_trust_argument, checkpoints_of, say

if TYPE_CHECKING:
    from rljob_worker.checkpoints.reader import Checkpoints, Found


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face folder",
        description="Write the weights of a run's checkpoint as a Hugging Face folder (safetensors, config, tokenizer) "
        "that transformers and plain vLLM load; with training.lora adapters are merged into them. Needs no devices.",
    )
    command.add_argument("folder", metavar="DIR", type=folder_name, help="the run folder")
    chosen = command.add_mutually_exclusive_group()
    chosen.add_argument("--step", type=int, metavar="N", help="checkpoint to export (default: the newest)")
    chosen.add_argument("--best", action="store_true", help="the one that checkpoint.keepBest of the job keeps")
    command.add_argument(
        "--to", type=folder_name, metavar="FOLDER", required=True, help="folder to write; must be empty"
    )
    command.add_argument(
        "--push-to",
        metavar="ORG/NAME",
        help="upload the folder to this repository of the Hugging Face hub too, which is made private where there is "
        "none; HF_TOKEN has the token, HF_ENDPOINT another hub",
    )
    command.add_argument(
        "--adapters", action="store_true", help="write the adapters of training.lora alone, as PEFT has them"
    )
    add_trust_argument(command)
    command.add_argument("--public", action="store_true", help="make the repository of --push-to public")
    command.set_defaults(run=run)


def _best(folder: Path, spec: dict[str, Any], store: Checkpoints) -> int:
    from rljob_api.spec import KeepBestSpec
    from rljob_worker.errors import UserError
    from rljob_worker.records.metric_history import best_step, values_of
    from rljob_worker.records.steps import read_steps

    given = spec["checkpoint"].get("keepBest")
    if given is None:
        raise UserError(f"--best: the run in {folder} has no spec.checkpoint.keepBest; name a step with --step")
    best = KeepBestSpec.model_validate(given)
    step = best_step(values_of(read_steps(folder), best.metric), best.mode, [one.step for one in store.candidates()])
    if step is None:
        raise UserError(f"--best: no step with a checkpoint in {store.root} has a value of {best.metric} yet")
    return step


def _chosen(arguments: argparse.Namespace, spec: dict[str, Any], store: Checkpoints) -> Found:
    """The checkpoint that was asked for, all of it verified: one that is named, or the newest that is whole."""
    from rljob_worker.errors import UserError

    step = _best(arguments.folder, spec, store) if arguments.best else arguments.step
    found = store.find_whole() if step is None else store.whole(step)
    if found is None:
        raise UserError(f"{store.root}: no complete checkpoint yet")
    return found


def export_found(found: Found, run_folder: Path, spec: dict[str, Any], target: Path, *, adapters: bool = False) -> None:
    """Write a run's checkpoint as a Hugging Face folder.

    Args:
        found: the checkpoint.
        run_folder: of the run.
        spec: the run's job, as `run.json` has it.
        target: folder to write; must hold no weights yet.
        adapters: write adapters alone.
    """
    from rljob_api.spec import ModelSpec, RolloutSpec
    from rljob_worker.driver.inputs import MODEL_FOLDER, checkpoint_folder
    from rljob_worker.trainer.export import export_adapters, export_checkpoint, format_of, needs_beginning

    rollout, model = RolloutSpec.model_validate(spec["rollout"]), ModelSpec.model_validate(spec["model"])
    own = run_folder / MODEL_FOLDER
    if adapters:
        export_adapters(found.folder, own, target, found.state.world_size, model.path or str(own.absolute()))
        return
    beginning = None
    if needs_beginning(format_of(found.folder, own)):
        beginning = own if model.path is None else checkpoint_folder(model)
    export_checkpoint(found.folder, own, target, found.state.world_size, rollout, beginning)


def run(arguments: argparse.Namespace) -> int:
    """Export the checkpoint."""
    from rljob_worker.data.hub import check_push, push_folder
    from rljob_worker.errors import UserError
    from rljob_worker.records.run_files import require_run_folder

    run_of = require_run_folder(arguments.folder)
    spec = run_of.spec
    store = checkpoints_of(arguments.folder, spec, arguments.trust_unverified)
    if arguments.to.exists() and (not arguments.to.is_dir() or any(arguments.to.iterdir())):
        raise UserError(f"--to: {arguments.to} exists and is not an empty folder")
    if arguments.push_to is not None:
        check_push(arguments.push_to)
    elif arguments.public:
        raise UserError("--public: only with --push-to")
    found = _chosen(arguments, spec, store)
    say(found)
    export_found(found, arguments.folder, spec, arguments.to, adapters=arguments.adapters)
    # Only now what takes seconds to import.
    from rljob_api.safe_text import visible_line

    step = found.state.step
    print(f"step {step} exported to {arguments.to}")
    if arguments.push_to is not None:
        message = f"{run_of.name}: step {step}"
        url = push_folder(arguments.to, arguments.push_to, message, private=not arguments.public)
        print(f"pushed to {visible_line(url)}")
    return 0
