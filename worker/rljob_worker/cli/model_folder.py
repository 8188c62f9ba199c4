"""A model folder on this machine, as far as it can be judged at once: without torch, transformers and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rljob_api.blocks import path_text
from rljob_api.problems import ManifestError, Problem
from rljob_api.rules.model_config import CHECKPOINT_TYPES, parallel_findings, value_findings
from rljob_api.spec import ModelSpec, RLJobSpec, TrainingBackend
from rljob_worker.data.hub import is_hub_id
from rljob_worker.data.tokenizer import TOKENIZER_FILES
from rljob_worker.errors import UserError
from rljob_worker.host.paths import home_expanded, what_is_at
from rljob_worker.models.facts import read_hf_config
from rljob_worker.models.json_files import check_json_files
from rljob_worker.models.places import MODEL_FOLDER, folder_here, folder_or_elsewhere, paths_beside
from rljob_worker.models.weight_files import tensor_files

FIELD = "spec.model.path"


def local_folder(model: ModelSpec, elsewhere: str = f"does not exist; {MODEL_FOLDER} is needed") -> Path | None:
    """The folder of `model.path`; None where there is nothing of that path here, and it may be a hub's id.

    Args:
        model: with a path or without.
        elsewhere: what is said of a path that is not here.

    Raises:
        UserError: the path leads to something else than a folder, or nowhere.
    """
    if model.path is None:
        return None
    folder = folder_here(model.path, FIELD)
    if folder is None and not is_hub_id(model.path):
        raise UserError(f"{FIELD}: {home_expanded(model.path)} {elsewhere}")
    return folder


def check_folders_beside(spec: RLJobSpec) -> None:
    """Refuse what is here of the paths of a critic's start and a teacher, and is no model's folder: UserError."""
    for field, path in paths_beside(spec):
        folder = folder_or_elsewhere(path, field)
        if folder is None:
            continue
        try:
            check_json_files(folder)
            read_hf_config(folder)
            tensor_files(folder)
        except UserError as error:
            raise UserError(f"{field}: of {folder}: {error}") from None


def check_model_folder(folder: Path, spec: RLJobSpec) -> None:
    """Refuse a folder that trainers and engines cannot start from, by what is in it and its config, and a job that
    does not fit it.

    Raises:
        UserError: with the file and what is wrong.
    """
    config = folder / "config.json"
    content = read_hf_config(folder)
    for problem in config_problems(content, spec.training.backend):
        raise UserError(f"{FIELD}: {config}: {problem}")
    check_json_files(folder)
    names = {path.name: path for path in folder.iterdir()}
    if not any(path.match(pattern) for path in names.values() for pattern in TOKENIZER_FILES):
        raise UserError(f"{FIELD}: {folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    if not any(name.endswith(".safetensors") for name in names):
        raise UserError(f"{FIELD}: {folder}: no weights: there is no *.safetensors file")
    _check_kinds(names)
    try:
        tensor_files(folder)
    except UserError as error:
        raise UserError(f"{FIELD}: {error}") from None
    if wrong := fit_problems(content, spec):
        raise UserError(str(ManifestError(wrong, str(config))))


def _check_kinds(names: Mapping[str, Path]) -> None:
    """Refuse what is no file and has the name of one that is read."""
    what = {"other": "is a pipe or device, not a file", "folder": "is a folder, not a file", "nothing": "leads nowhere"}
    for name, path in names.items():
        if not name.endswith((".json", ".safetensors", ".txt", ".model", ".jinja")):
            continue
        try:
            kind = what_is_at(path)
        except OSError as error:
            raise UserError(f"{FIELD}: {path}: {error.strerror}") from None
        if kind in what:
            raise UserError(f"{FIELD}: {path} {what[kind]}")


def fit_problems(config: dict[str, object], spec: RLJobSpec) -> list[Problem]:
    """Problems of a job's sizes, lengths and tokens that do not fit its model."""
    return [
        Problem(path_text(("spec", *finding.path)), finding.wrong, finding.allowed)
        for finding in parallel_findings(config, spec)
    ]


def config_problems(config: dict[str, object], backend: TrainingBackend) -> list[Problem]:
    """Problems that keep RLJob from building a model, by the names in config.json."""
    if backend is TrainingBackend.MEGATRON and config.get("model_type") not in CHECKPOINT_TYPES:
        return [Problem("model_type", "is not built", ", ".join(CHECKPOINT_TYPES), config.get("model_type"))]
    return [*_architectures(config, backend)] + [
        Problem(".".join(map(str, finding.path)), finding.wrong, finding.allowed, _value_at(config, finding.path))
        for finding in value_findings(config, backend)
    ]


_BUILT_AS = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


def _architectures(config: dict[str, object], backend: TrainingBackend) -> Iterator[Problem]:
    """Engines build the class that a config names; backend FSDP holds it against transformers' own."""
    given, built = config.get("architectures"), _BUILT_AS.get(str(config.get("model_type")))
    if given is None:
        return
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        yield Problem("architectures", "is no list of names", f'["{built or "Qwen3ForCausalLM"}"]', given)
    elif backend is TrainingBackend.MEGATRON and built is not None and given and built not in given:
        wrong = f"engines would build another model than trainers, who take {config['model_type']} as {built}"
        yield Problem("architectures", wrong, built, given)


def _value_at(config: dict[str, object], path: tuple[object, ...]) -> object:
    value: object = config
    for key in path:
        value = value.get(str(key)) if isinstance(value, dict) else None
    return value
