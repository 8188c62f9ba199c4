"""Checks of `rljob validate` on this machine: model, data, rewards, environments, with the worker's packages."""

from __future__ import annotations

from rljob_api import RLJob, RLJobSpec
from rljob_api.problems import ManifestError, Problem
from rljob_api.safe_text import visible, visible_line
from rljob_api.spec.sandbox import Isolation
from rljob_worker.cli.environments import TriedEnvironments
from rljob_worker.data.renderer import ScoredRows
from rljob_worker.data.reward_rows import unused_parts
from rljob_worker.data.sources import check_path, data_sources, evaluation_sources, load_source
from rljob_worker.driver.preflight import check_engine_arguments, check_layout
from rljob_worker.errors import UserError
from rljob_worker.host.paths import home_expanded, what_is_at
from rljob_worker.models.judge_model import check_judge_folder
from rljob_worker.rewards.judge_texts import check_prompts
from rljob_worker.rewards.row_check import check_first_rows, scored_rows
from rljob_worker.rewards.source_check import check_filter, check_sources, told_signatures
from rljob_worker.sandbox import namespaces
from rljob_worker.sandbox.kernel import no_namespaces
from rljob_worker.sandbox.servers import ONLY_CLAIMED


def look(job: RLJob, manifest: str) -> list[str]:
    """Check what a manifest names, where it is on this machine; lines that tell of it.

    Args:
        job: validated.
        manifest: as the command line names it.

    Raises:
        UserError: what is wrong.
    """
    check_layout(job.spec)
    check_engine_arguments(list(job.spec.rollout.engine_args))
    problems = _of_local_model(job)
    if problems:
        raise UserError(str(ManifestError(problems, manifest)))
    check_sources(job.spec, on_this_machine=False)
    check_prompts(job.spec.judges)
    check_judge_folder(job.spec)
    _check_folders_beside(job.spec)
    told = told_signatures(job.spec)
    environments = TriedEnvironments(job.spec)
    shown = _first_prompts(job.spec, environments)
    shown += environments.first_prompts() if _has_tokenizer(job.spec) else []
    _check_weights(job.spec)
    return [*map(visible_line, [*told, *environments.lines(), *_of_sandbox(job.spec)]), *map(visible, shown)]


def _check_folders_beside(spec: RLJobSpec) -> None:
    from rljob_worker.cli.model_folder import check_folders_beside

    check_folders_beside(spec)


def _of_sandbox(spec: RLJobSpec) -> list[str]:
    """A warning where this machine does not give programs the sandbox that the job wants; its own may."""
    if spec.sandbox is None:
        return []
    if spec.sandbox.service is not None and spec.sandbox.service.warm_pool is not None:
        return [f"warning: {ONLY_CLAIMED}"]
    if spec.sandbox.isolation != Isolation.NAMESPACE:
        return []
    problem = namespaces.problem()
    return [f"warning: {no_namespaces(problem)}"] if problem else []


def _first_prompts(spec: RLJobSpec, environments: TriedEnvironments) -> list[str]:
    """Lines that show the first prompts, where model and data are on this machine.

    Args:
        spec: the job.
        environments: its own, whose tools a template shows.

    Raises:
        UserError: a row, a template or a tokenizer cannot be used.
    """
    sources = data_sources(spec) + evaluation_sources(spec)
    local = [(field, source) for field, source in sources if not _elsewhere(source.path)]
    columns: dict[str, frozenset[str] | None] = {}
    for field, source in sources:
        if source.path is None or _is_relative(source.path) or not _elsewhere(source.path):
            check_path(source, field)
            columns[field] = check_first_rows(spec, source, field)
    check_filter(spec, columns)
    model_here = spec.model.random is not None or not _elsewhere(spec.model.path)
    if not local or not model_here or len(local) < len(sources):
        found = [scored_rows(spec, load_source(source, field)) for field, source in local]
        return _by_value(found, complete=len(local) == len(sources))
    # Importing transformers takes seconds: what is wrong in the first rows is said before.
    from rljob_worker.data.preview import first_prompts

    held_out = [scored_rows(spec, load_source(source, field)) for field, source in evaluation_sources(spec)]
    previews, training = first_prompts(spec, _longest_prompt(spec), environments.tried.tools(), environments.spoken())
    return [line for preview in previews for line in preview.lines()] + _by_value(training + held_out, complete=True)


def _by_value(scored: list[ScoredRows], *, complete: bool) -> list[str]:
    """Lines with the rows of each value that chooses a reward, and, where all sources are here, parts without rows."""
    routed = [one.routed for one in scored if one.routed is not None]
    unused = unused_parts(routed) if complete else []
    return [line for one in routed for line in one.lines()] + [f"warning: {said}" for said in unused]


def _check_weights(spec: RLJobSpec) -> None:
    """Hold the tensors of a model folder on this machine against its config, as the start of a run does."""
    if _elsewhere(spec.model.path):
        return
    # torch, whose import takes seconds.
    from rljob_worker.models.hf_check import check_hf_weights
    from rljob_worker.models.trained import trained_model

    assert spec.model.path is not None
    folder = home_expanded(spec.model.path)
    check_hf_weights(folder, trained_model(spec.training.backend, folder))


def _has_tokenizer(spec: RLJobSpec) -> bool:
    """Whether this machine has the model's tokenizer, or all that one is trained on."""
    if spec.model.random is None:
        return not _elsewhere(spec.model.path)
    sources = data_sources(spec) + evaluation_sources(spec)
    return all(source.path is None or not _elsewhere(source.path) for _, source in sources)


def _longest_prompt(spec: RLJobSpec) -> int:
    from rljob_worker.engine.arguments import longest_prompt
    from rljob_worker.models.facts import ModelFacts

    random = spec.model.random
    if random is not None:
        return longest_prompt(spec, ModelFacts.from_hf({"vocab_size": random.tokenizer.vocab_size} | random.config))
    assert spec.model.path is not None
    return longest_prompt(spec, ModelFacts.from_hf(home_expanded(spec.model.path)))


def _is_relative(path: str | None) -> bool:
    """Whether it says itself that it is of this machine: neither a hub nor a pod has `./data`."""
    return path is not None and path.startswith(("./", "../"))


def _of_local_model(job: RLJob) -> list[Problem]:
    """Problems of the job with the config of a model folder on this machine.

    Raises:
        UserError: the folder is none, or lacks what trainers and engines start from.
    """
    from rljob_worker.cli.model_folder import check_model_folder, config_problems, fit_problems, local_folder
    from rljob_worker.models.facts import read_hf_config
    from rljob_worker.models.json_files import check_json_files

    path = job.spec.model.path
    folder = local_folder(job.spec.model) if _is_relative(path) or not _elsewhere(path) else None
    if folder is None:
        return []
    check_json_files(folder)
    config = read_hf_config(folder)
    wrong = config_problems(config, job.spec.training.backend)
    if wrong:
        where = folder / "config.json"
        return [Problem("spec.model.path", f"{where}: {problem}", "", path) for problem in wrong]
    problems = fit_problems(config, job.spec)
    if not problems:
        check_model_folder(folder, job.spec)
    return problems


def _elsewhere(path: str | None) -> bool:
    """Whether nothing of the path is here: it may be another machine's, or a hub's."""
    try:
        return path is None or what_is_at(home_expanded(path)) == "nothing"
    except OSError:
        return False
