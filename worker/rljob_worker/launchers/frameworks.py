"""A file of another framework becomes a manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob_worker.errors import UserError
from rljob_worker.host.files import read_file
from rljob_worker.launchers import configuration, roll, slime, trl, verl
from rljob_worker.launchers.draft import Draft, Line, Setting
from rljob_worker.launchers.shell import MAX_CHARACTERS, Command, Script, Word, read_script
from rljob_worker.launchers.variables import apply_variables

FRAMEWORKS = ("vime", "slime", "relax", "verl", "roll", "trl")
_PROFILES = {
    "vime": "ascend-a2",
    "relax": "ascend-a2",
    "roll": "ascend-a2",
    "slime": "cuda",
    "verl": "cuda",
    "trl": "cuda",
}
_ORDER = ("steps", "seed", "mode", "model", "data", "reward", "evaluation", "algorithm", "rollout", "training",
          "weightSync", "resources", "memorySaver", "hccl", "network", "environment",
          "checkpoint", "records")  # fmt: skip
_NAME_LENGTH = 40
_PROGRAMS = {
    "verl": "python3 -m verl.trainer...",
    "trl": "trl grpo",
    **dict.fromkeys(("vime", "slime", "relax"), "train.py or train_async.py"),
}


@dataclass(frozen=True, slots=True)
class Imported:
    """Result of the import of a file."""

    manifest: dict[str, object]
    lines: list[Line]
    notes: list[str]
    """Notes that hold for the whole of it."""


def import_file(
    framework: str, path: Path, *, variables: Mapping[str, str], profile: str | None, devices: int | None
) -> Imported:
    """Read a file of `framework`; nothing of it is run.

    Raises:
        UserError: it cannot be read, or is no file of that framework.
    """
    text = _read(path)
    draft, notes = Draft(), list[str]()
    draft.assume("resources.profile", profile or _PROFILES[framework])
    try:
        if path.suffix in (".yaml", ".yml"):
            _apply_configuration(draft, framework, text, devices)
        elif framework == "trl" and path.suffix == ".py":
            trl.apply_settings(draft, list(trl.settings_of_script(text)), devices)
        elif framework == "roll":
            raise UserError("is no YAML file: ROLL's settings are in the file that --config_name names")
        else:
            notes += _apply_script(draft, framework, read_script(text, variables), devices)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if profile is not None:
        draft.assume("resources.profile", profile)
    elif all(line.field != "resources.profile" for line in draft.lines):
        notes.insert(0, f"resources.profile: {_PROFILES[framework]} is assumed; --profile names another one")
    if str(draft.get("model.path")).startswith(("/", "./", "../", "~")) and isinstance(
        model := draft.spec["model"], dict
    ):
        # Only what is fetched comes from a hub.
        model.pop("hub", None)
    if draft.defaults:
        notes.append(f"defaults of {framework}, written down: {', '.join(draft.defaults)}")
    spec = {name: draft.spec[name] for name in _ORDER if name in draft.spec}
    document: dict[str, object] = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": job_name(draft.name or path.stem)},
        "spec": spec | {name: block for name, block in draft.spec.items() if name not in spec},
    }
    return Imported(document, draft.lines, notes)


def job_name(text: str) -> str:
    """A name as Kubernetes has them, from a file's."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower())[:_NAME_LENGTH].strip("-")
    return found if found[:1].isalpha() else f"job-{found}".strip("-")


def _read(path: Path) -> str:
    try:
        content = read_file(path, MAX_CHARACTERS)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: a script or configuration is needed") from None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from None


def _apply_configuration(draft: Draft, framework: str, text: str, devices: int | None) -> None:
    document = configuration.read_configuration(text)
    settings = configuration.settings_of(dict(configuration.flattened(document)))
    if framework == "roll":
        if not roll.is_configuration(document):
            raise UserError("has no actor_train: is it a configuration of ROLL?")
        roll.apply_settings(draft, settings)
    elif framework == "verl":
        if not {"actor_rollout_ref", "data"} & document.keys():
            raise UserError("has neither actor_rollout_ref nor data: is it a configuration of verl?")
        verl.apply_settings(draft, settings)
    elif framework == "trl":
        trl.apply_settings(draft, [Setting(str(name), value) for name, value in document.items()], devices)
    else:
        raise UserError(f"is YAML: {framework} has launch scripts")


def _apply_script(draft: Draft, framework: str, script: Script, devices: int | None) -> list[str]:
    command = _command(framework, script)
    apply_variables(draft, [_variable(name, word, script) for name, word in script.exported.items()])
    apply_variables(draft, [_variable(name, word, script) for name, word in command.environment.items()])
    if framework == "verl":
        verl.apply_settings(draft, list(configuration.overrides_of(command.words, script.conditional)))
    elif framework == "trl":
        flags = slime.settings_of(command.words, script.conditional)
        named = [
            Setting(flag.name.removeprefix("--").replace("-", "_"), _single(flag.value), flag.unknown) for flag in flags
        ]
        processes = next((flag for flag in named if flag.name in ("num_processes", "nproc_per_node")), None)
        found = int(str(processes.value)) if processes and str(processes.value).isdecimal() else devices
        trl.apply_settings(draft, [flag for flag in named if flag is not processes], devices or found)
    else:
        slime.apply_command(draft, command, script.conditional, framework)
    read = [f"{name} is read by the script and was not looked into" for name in script.sourced]
    return read + [f"the array {name} is set nowhere: its elements are not here" for name in sorted(script.missing)]


def _single(value: object) -> object:
    """The value of a flag, a list only where it has several; none is true."""
    if not isinstance(value, list):
        return value
    return True if not value else value[0] if len(value) == 1 else value


def _command(framework: str, script: Script) -> Command:
    """The last command that starts the framework's training."""
    recognise = {"verl": verl.is_command, "trl": trl.is_command}.get(framework, slime.is_command)
    found = [command for command in script.commands if recognise(command)]
    if not found:
        raise UserError(f"has no command that starts {framework}: {_PROGRAMS[framework]} was looked for")
    return found[-1]


def _variable(name: str, word: Word, script: Script) -> Setting:
    return Setting(name, word.text, word.unknown, tuple(sorted((word.used | {name}) & script.conditional)))
