"""`rljob export`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face folder",
        description="Write the weights of a run's checkpoint as a Hugging Face folder (safetensors, config, tokenizer) "
        "that transformers and plain vLLM load. Needs no devices.",
    )
    command.add_argument("folder", metavar="DIR", type=Path, help="the run folder")
    command.add_argument("--step", type=int, metavar="N", help="checkpoint to export (default: the newest)")
    command.add_argument("--to", type=Path, metavar="FOLDER", required=True, help="folder to write; must be empty")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export the checkpoint."""
    from rljob_worker.driver.checkpoints import Checkpoints, checkpoint_root
    from rljob_worker.errors import UserError
    from rljob_worker.records.run_files import require_run_folder

    spec = require_run_folder(arguments.folder).spec
    root = checkpoint_root(arguments.folder, spec["checkpoint"]["path"])
    store = Checkpoints(root)
    newest = store.latest()
    if newest is None:
        raise UserError(f"{root}: no complete checkpoint yet")
    state = newest if arguments.step is None else store.read(arguments.step)
    if arguments.to.exists() and (not arguments.to.is_dir() or any(arguments.to.iterdir())):
        raise UserError(f"--to: {arguments.to} exists and is not an empty folder")
    # Only now what takes seconds to import.
    from rljob_worker.driver.inputs import MODEL_FOLDER
    from rljob_worker.trainer.export import export_checkpoint

    export_checkpoint(store.folder(state.step), arguments.folder / MODEL_FOLDER, arguments.to, state.world_size)
    print(f"step {state.step} exported to {arguments.to}")
    return 0
