"""`rljob validate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rljob_api import RLJob, RLJobSpec
from rljob_api.problems import ManifestError, Problem
from rljob_api.safe_text import visible, visible_line
from rljob_api.spec import DataSource
from rljob_worker.cli.environments import TriedEnvironments
from rljob_worker.cli.manifest import add_manifest_arguments, read_manifest
from rljob_worker.data.sources import check_head, check_path, data_sources, evaluation_sources, load_source
from rljob_worker.driver.preflight import check_engine_arguments, check_layout
from rljob_worker.errors import UserError
from rljob_worker.host.paths import home_expanded, what_is_at
from rljob_worker.rewards.source_check import told_signatures


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "validate",
        help="check a manifest",
        description="Check a manifest by the API's rules, as `kubectl apply` would; prints each problem with its path. "
        "Where the model's folder is on this machine, its files and its config are checked too; where the data are, "
        "all of their rows; where both are, the first prompt is shown as the policy will get it. Environments are "
        "reset and stepped in processes like a job's.",
    )
    add_manifest_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Say that the manifest is valid, or list what is wrong."""
    job = read_manifest(arguments)
    check_layout(job.spec)
    check_engine_arguments(list(job.spec.rollout.engine_args))
    problems = _of_local_model(job)
    if problems:
        raise UserError(str(ManifestError(problems, arguments.manifest)))
    told = told_signatures(job.spec)
    environments = TriedEnvironments(job.spec)
    shown = [*_first_prompts(job.spec), *(environments.first_prompts() if _has_tokenizer(job.spec) else [])]
    print(f"{arguments.manifest}: {job.metadata.name} is valid")
    for sentence in [*told, *environments.lines()]:
        print(visible_line(sentence))
    for line in shown:
        print(visible(line))
    return 0


def _first_prompts(spec: RLJobSpec) -> list[str]:
    """Lines that show the first prompts, where model and data are on this machine.

    Raises:
        UserError: a row, a template or a tokenizer cannot be used.
    """
    sources = data_sources(spec) + evaluation_sources(spec)
    local = [(field, source) for field, source in sources if _is_here(source)]
    for field, source in local:
        check_path(source, field)
        check_head(source, field)
    model_here = spec.model.random is not None or _here(spec.model.path)
    if not local or not model_here or len(local) < len(sources):
        for field, source in local:
            load_source(source, field)
        return []
    # Importing transformers takes seconds: what is wrong in the first rows is said before.
    from rljob_worker.data.preview import first_prompts

    for field, source in evaluation_sources(spec):
        load_source(source, field)
    return [line for preview in first_prompts(spec) for line in preview.lines()]


def _has_tokenizer(spec: RLJobSpec) -> bool:
    """Whether this machine has the model's tokenizer, or all that one is trained on."""
    if spec.model.random is None:
        return _here(spec.model.path)
    sources = data_sources(spec) + evaluation_sources(spec)
    return all(source.path is None or _is_here(source) for _, source in sources)


def _is_here(source: DataSource) -> bool:
    """Whether it is read from this machine: the paths of a cluster's job may be another one's."""
    return source.path is not None and _here(source.path)


def _here(path: str | None) -> bool:
    if path is None:
        return False
    try:
        return what_is_at(home_expanded(path)) != "nothing"
    except OSError:
        return False


def _of_local_model(job: RLJob) -> list[Problem]:
    """What of the job does not fit the config of a model folder on this machine."""
    from rljob_worker.cli.model_folder import config_problems, fit_problems
    from rljob_worker.models.facts import read_hf_config
    from rljob_worker.models.json_files import check_json_files

    folder = _folder(job)
    if folder is None:
        return []
    check_json_files(folder)
    config = read_hf_config(folder)
    wrong = config_problems(config, job.spec.training.backend)
    if wrong:
        where = folder / "config.json"
        return [Problem("spec.model.path", f"{where}: {problem}", "", job.spec.model.path) for problem in wrong]
    return fit_problems(config, job.spec)


def _folder(job: RLJob) -> Path | None:
    """The model's folder, where this machine has it: it may be another machine's, or a hub's."""
    if job.spec.model.path is None:
        return None
    try:
        folder = home_expanded(job.spec.model.path)
        return folder if what_is_at(folder / "config.json") != "nothing" else None
    except OSError as error:
        raise UserError(f"spec.model.path: {job.spec.model.path}: {error.strerror}") from None
