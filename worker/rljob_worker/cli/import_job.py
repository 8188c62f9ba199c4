"""`rljob import`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rljob_api.how_many import how_many
from rljob_api.problems import ManifestError
from rljob_api.profiles import PROFILES
from rljob_api.safe_text import visible, visible_line
from rljob_worker.cli.manifest import file_name, require_writable
from rljob_worker.errors import UserError
from rljob_worker.launchers.frameworks import FRAMEWORKS, Imported, import_file

_DESCRIPTION = """Turn a launch script or configuration of another framework into an RLJob. The file is read and never
run: command substitutions stay what they are, branches are not decided, a Python script is not imported.

  vime, slime, relax  a shell script that calls train.py or train_async.py
  verl                a shell script that calls verl.trainer.main_ppo, or a configuration in YAML
  roll                the configuration in YAML that --config_name names
  trl                 a Python script with GRPOConfig and GRPOTrainer, YAML, or a script with `trl grpo`

The manifest goes to standard output or to the file that -o names, with the account of every setting in comments at
its end: the field it became, or why it has none. Standard error has what is left to do.

Exit code 1 where the manifest is not valid yet: what is missing is listed.

examples:
  rljob import vime start_colocate.sh -o job.yaml
  rljob import slime run-qwen3-4B.sh --variable BASE_DIR=/storage
  rljob import trl train.py --devices 8"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "import",
        help="turn another framework's launch script into a manifest",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("framework", choices=FRAMEWORKS, help="the framework that the file is of")
    command.add_argument("file", type=file_name, metavar="FILE", help="launch script or configuration")
    command.add_argument("-o", "--output", type=file_name, metavar="JOB.yaml", help="a new file for the manifest")
    command.add_argument(
        "--variable",
        action="append",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="a shell variable that the script does not set, or sets otherwise (may be given several times)",
    )
    command.add_argument(
        "--profile", choices=sorted(PROFILES), help="resources.profile; default: the framework's usual one"
    )
    command.add_argument("--devices", type=_devices, metavar="N", help="TRL: processes of the training")
    command.set_defaults(run=run)


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    return name, value


def _devices(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes; use 1 or more")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Write the manifest, and say what is left to do."""
    from rljob_api.wire.exit_codes import ExitCode

    if arguments.output is not None and not arguments.output.exists():
        require_writable(arguments.output, "--output")
    found = import_file(
        arguments.framework,
        arguments.file,
        variables=dict(arguments.variable),
        profile=arguments.profile,
        devices=arguments.devices,
    )
    text = manifest_text(found, arguments.framework, arguments.file.name)
    problems = problems_of(found)
    if arguments.output is None:
        print(text, end="")
    else:
        _write(arguments.output, text)
    _report(found, problems, str(arguments.output or "the manifest"))
    return ExitCode.FAILED if problems else ExitCode.OK


def manifest_text(found: Imported, framework: str, name: str) -> str:
    """The manifest in YAML, with the account of the settings behind it."""
    import yaml

    manifest = yaml.safe_dump(found.manifest, sort_keys=False, allow_unicode=True, width=120)
    taken = [
        f"#   {line.setting} -> {line.field}{f' ({line.why})' * bool(line.why)}" for line in found.lines if line.field
    ]
    left = [f"#   {line.setting}: {line.why}" for line in found.lines if not line.field]
    account = ["# Taken over:", *taken] * bool(taken) + ["# Without a field:", *left] * bool(left)
    lines = [f"# Made from {name} ({framework}) by `rljob import`.", manifest.rstrip("\n"), *account]
    return "\n".join(visible_line(line) if line.startswith("#") else line for line in lines) + "\n"


def problems_of(found: Imported) -> list[str]:
    """Problems of the manifest that `rljob validate` would report."""
    from rljob_api.validation import load_manifest

    try:
        load_manifest(found.manifest)
    except ManifestError as error:
        return [str(problem) for problem in error.problems]
    return []


def _write(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        raise UserError(f"{path} is there already: name a new file") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _report(found: Imported, problems: list[str], where: str) -> None:
    taken = sum(1 for line in found.lines if line.field)
    lines = [
        f"{how_many(taken, 'setting')} taken over, {len(found.lines) - taken} without a field (listed at the "
        "manifest's end)"
    ]
    lines += [f"note: {note}" for note in found.notes]
    lines += [f"note: {line.setting}: {line.why}" for line in found.lines if line.field and "branch" in line.why]
    if problems:
        lines.append(f"{where} is not valid yet:")
        lines += [f"  {problem}" for problem in problems]
    else:
        lines.append(f"next: rljob validate {where}, rljob plan {where}")
    print("\n".join(visible(visible_line(line)) for line in lines), file=sys.stderr)
