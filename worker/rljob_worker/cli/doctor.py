"""`rljob doctor`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from rljob_api.profiles.base import BACKEND_AUTOLOAD_VARIABLE
from rljob_api.safe_text import visible_json
from rljob_api.spec import RLJobSpec
from rljob_api.wanted import Wanted
from rljob_worker.cli.addresses import check_ray_address
from rljob_worker.cli.manifest import add_manifest_arguments, read_manifest
from rljob_worker.errors import UserError

_DESCRIPTION = """Look for what a job would stumble over on this machine: versions, devices, memory saver, allocator,
network, shared memory. One line each: what was found, what is wanted, how to fix it.

With a manifest the job says what is wanted; without one, what the machine shows. Nothing is changed, and without --deep
no device is used. docs/doctor.md says what each line means.

exit codes:
  0   no problems (warnings may be there; with --strict they count)
  1   problems were found
  2   the manifest or the command line is wrong

examples:
  rljob doctor
  rljob doctor job.yaml
  rljob doctor job.yaml --ray --json
  rljob doctor job.yaml --deep
  rljob doctor --patches"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "doctor",
        help="look for what a job would stumble over here",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_manifest_arguments(command, required=False)
    command.add_argument("--json", action="store_true", help="print the report as a document")
    command.add_argument("--strict", action="store_true", help="warnings count as problems")
    command.add_argument("--deep", action="store_true", help="use the devices too: memory, IPC, collectives (minutes)")
    command.add_argument("--head", metavar="HOST", help="try the ports of the Ray head there")
    command.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="HOST:PORT",
        help="look at all nodes of a Ray cluster (default: the one that this machine belongs to)",
    )
    command.add_argument("--wanted", metavar="JSON", help="what is wanted, as the operator hands it to its pods")
    command.add_argument(
        "--termination-message", type=Path, metavar="FILE", help="write the problems there, for a pod's status"
    )
    command.add_argument(
        "--patches", action="store_true", help="list what RLJob changes in vLLM, Megatron, torch and Ray instead"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Examine, print, and say by the exit code whether there are problems."""
    if arguments.patches:
        return _patches(arguments)
    if arguments.ray and arguments.head:
        raise UserError("--head: with --ray every node tries the ports of that cluster's head")
    if arguments.ray and arguments.deep:
        raise UserError("--deep: looks at this node; run it on each node, without --ray")
    if arguments.ray:
        check_ray_address("--ray", arguments.ray)
    wanted = _wanted(arguments)
    from rljob_worker.doctor.output import show, termination_message
    from rljob_worker.doctor.report import of_cluster, of_node

    if arguments.ray:
        report = of_cluster(wanted, arguments.ray)
    else:
        report = of_node(wanted, arguments.head, deep=arguments.deep)
    if arguments.json:
        print(visible_json(report.document()))
    else:
        show(report, Console())
    if arguments.termination_message is not None:
        arguments.termination_message.write_text(termination_message(report))
    return report.exit_code(strict=arguments.strict)


def _patches(arguments: argparse.Namespace) -> int:
    for option in ("manifest", "ray", "head", "deep", "strict", "wanted", "termination_message"):
        if getattr(arguments, option):
            name = "a manifest" if option == "manifest" else f"--{option.replace('_', '-')}"
            raise UserError(f"--patches: lists what is installed here, and goes with --json alone, not with {name}")
    from rljob_worker.doctor.collect import kind_of
    from rljob_worker.doctor.patches import PatchReport

    report = PatchReport(kind_of(None))
    if arguments.json:
        print(visible_json(report.document()))
    else:
        report.show(Console())
    return report.exit_code()


def _wanted(arguments: argparse.Namespace) -> Wanted | None:
    if arguments.wanted is not None:
        if arguments.manifest is not None:
            raise UserError("--wanted: not with a manifest, which says the same")
        try:
            return Wanted.model_validate_json(arguments.wanted)
        except ValueError as error:
            raise UserError(f"--wanted: {error}") from None
    if arguments.manifest is None:
        if arguments.overrides:
            raise UserError("--set: needs a manifest to override")
        return None
    spec = read_manifest(arguments).spec
    return Wanted.of(spec) if arguments.ray else _on_this_machine(Wanted.of(spec), spec)


def _on_this_machine(wanted: Wanted, spec: RLJobSpec) -> Wanted:
    """Variables that `rljob run` gives its processes here, where no pod does; without the memory saver, which is a
    finding."""
    # As `rljob run` has it: the processes that use devices are others.
    os.environ[BACKEND_AUTOLOAD_VARIABLE] = "0"
    from rljob_worker.cluster.machine import machine_variables

    given = spec.environment
    engine = machine_variables(spec, trainer=False)
    try:
        trainer = machine_variables(spec, trainer=True)
    except UserError:
        trainer = engine
    return wanted.model_copy(
        update={
            "trainer": {**wanted.trainer, **trainer, **given.variables, **given.trainer},
            "rollout": {**wanted.rollout, **engine, **given.variables, **given.rollout},
        }
    )
