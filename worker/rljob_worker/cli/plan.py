"""`rljob plan`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api.wire.exit_codes import ExitCode
from rljob_worker.cli.manifest import add_manifest_arguments, bytes_of, folder_name, read_manifest
from rljob_worker.errors import UserError, no_folder

if TYPE_CHECKING:
    from rljob_api.spec import RLJobSpec
    from rljob_worker.models.trained import TrainedModel

_DESCRIPTION = """Say how much device and host memory a job needs in each phase, before it has any device.

Prints one table for each kind of rank and one for a node, whether they fit, and, where they do not, changes of the
manifest after which they do. The exit code is 0 when the job fits, 1 when it does not.

examples:
  rljob plan job.yaml
  rljob plan job.yaml --set spec.training.tensorParallel=4
  rljob plan job.yaml --model ~/Qwen3-4B --device-memory 64Gi --json"""
_WIDTH = 160
_CONFIG = ("config.json",)
_ELSEWHERE = "is not on this machine; give a copy of its config with --model"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "plan",
        help="say whether a job fits into memory",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_manifest_arguments(command)
    command.add_argument(
        "--model",
        type=folder_name,
        metavar="FOLDER",
        help="folder with the model's config.json, where spec.model.path is not on this machine",
    )
    command.add_argument("--device-memory", metavar="SIZE", help="memory of a device, e.g. 64Gi (default: profile's)")
    command.add_argument("--node-memory", metavar="SIZE", help="host memory of a worker pod (default: the job's)")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan and print."""
    job = read_manifest(arguments)
    device_bytes, node_bytes = (
        None if given is None else bytes_of(given, option)
        for given, option in ((arguments.device_memory, "--device-memory"), (arguments.node_memory, "--node-memory"))
    )
    _check_config(job.spec, arguments.model)
    from functools import partial

    from rich.console import Console

    from rljob_worker.planning.assumptions import assumptions
    from rljob_worker.planning.plan import plan_memory
    from rljob_worker.planning.remedies import find_remedies, larger_cache
    from rljob_worker.planning.render import as_json, as_renderable

    model = _model_config(job.spec, arguments.model)
    replan = partial(plan_memory, model=model, device_bytes=device_bytes, node_bytes=node_bytes)
    plan = replan(job.spec)
    remedies = None if plan.fits else find_remedies(job, plan, replan)
    hint = larger_cache(job.spec, plan)
    assumed = assumptions(job.spec, model, plan)
    if arguments.json:
        print(json.dumps(as_json(plan, remedies, hint, assumed), indent=2))
    else:
        console = Console()
        console.width = console.width if console.is_terminal else _WIDTH
        console.print(as_renderable(plan, remedies, hint, assumed), highlight=False, soft_wrap=False)
    return ExitCode.OK if plan.fits else ExitCode.FAILED


def _check_config(spec: RLJobSpec, given: Path | None) -> None:
    """Refuse a config that is none before what plans with it is imported, which takes seconds."""
    from rljob_worker.cli.model_folder import config_problems, local_folder
    from rljob_worker.models.facts import read_hf_config

    if given is not None and not given.is_dir():
        raise UserError(f"--model: {no_folder(given)}; a folder with the model's config.json is needed")
    folder = given
    if given is None and spec.model.path is not None:
        folder = local_folder(spec.model, elsewhere=_ELSEWHERE)
    if folder is not None:
        option = "--model" if given is not None else "spec.model.path"
        for problem in config_problems(read_hf_config(folder), spec.training.backend):
            raise UserError(f"{option}: {folder / 'config.json'}: {problem}")


def _model_config(spec: RLJobSpec, folder: Path | None) -> TrainedModel:
    from rljob_worker.cli.model_folder import local_folder
    from rljob_worker.data.hub import snapshot
    from rljob_worker.models.trained import trained_model

    model, backend = spec.model, spec.training.backend
    if folder is not None:
        return trained_model(backend, folder)
    if model.random is not None:
        return trained_model(backend, {"vocab_size": model.random.tokenizer.vocab_size} | model.random.config)
    assert model.path is not None
    local = local_folder(model, elsewhere=_ELSEWHERE)
    if local is not None:
        return trained_model(backend, local)
    fetched = snapshot(model.path, model.hub, "spec.model", revision=model.revision, patterns=_CONFIG)
    return trained_model(backend, fetched)
