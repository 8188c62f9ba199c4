"""Models, data sets and chat templates: where each is read from, and which of its fields say anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from rljob_api.derived import data_sources, held_out_sources
from rljob_api.rules.findings import Check, Finding, one_line, path_faults, snake, unprintable
from rljob_api.rules.places import parts_of
from rljob_api.spec import (
    ChatSpec,
    CriticModelSpec,
    DataSource,
    DataSpec,
    EvaluationSet,
    EvaluationSpec,
    Hub,
    JudgeModel,
    ModelSpec,
    RLJobSpec,
    TeacherSpec,
)

_FILES = {".csv", ".tsv", ".txt", ".json", ".gz", ".zip", ".zst", ".xlsx", ".arrow", ".pickle", ".pkl"}
_WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".json"}
_OF_SOURCES = ("subset", "split", "promptKey", "labelKey", "imageKey")
_OF_A_DATASET = {"split": "train", "subset": None, "hub": Hub.HUGGING_FACE}
_OF_EACH_SOURCE = {
    **{"name": None, "split": "train", "subset": None, "hub": Hub.HUGGING_FACE, "promptKey": "prompt"},
    **{"labelKey": "label", "applyChatTemplate": False, "weight": 1.0, "chat": None},
    "environment": None,
}
_OF_ROWS = {"promptKey": ("prompt",), "labelKey": ("label", None)}
_GIVEN_TO_TEMPLATES = (
    *("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("chat_template", "tokenizer_kwargs", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
    *("padding", "truncation", "max_length", "kwargs"),
)


def _model(model: Any) -> Iterator[Finding]:
    yield from path_faults(
        "path", model.path, "a folder with config.json, *.safetensors and tokenizer, or a hub id", _WEIGHTS
    )
    local = model.path is None or model.path.startswith(("/", "~", "."))
    if local and model.hub != Hub.HUGGING_FACE:
        yield Finding(("hub",), "nothing is fetched from a hub", "only with a path that is a hub id")
    if model.path is not None and local and model.revision is not None:
        yield Finding(("revision",), "a local folder has no revisions", "only with a path that is a hub id")


def _other_model(model: Any) -> Iterator[Finding]:
    yield from path_faults("path", model.path, "a folder with config.json and *.safetensors, or a hub id", _WEIGHTS)


def _chat(chat: Any) -> Iterator[Finding]:
    yield from path_faults("templateFile", chat.template_file, "a Jinja file", set())
    for name in chat.template_args:
        if name in _GIVEN_TO_TEMPLATES:
            yield Finding(("templateArgs", name), "is given to every template already", "another name")
        elif not name.isidentifier():
            yield Finding(("templateArgs", name), "is no name of a variable", "letters, digits and '_'")


def _source(source: Any) -> Iterator[Finding]:
    what = "a .jsonl or .parquet file, a folder written by save_to_disk, or a hub id"
    yield from path_faults("path", source.path, what, _FILES)
    if source.name is not None and (unprintable(source.name) or re.search(r"^\.|[/\\]", source.name)):
        yield Finding(("name",), "is no name of a data set: it stands in names of metrics", "without '/' and '\\'")
    if source.label_key is not None and source.label_key == source.prompt_key:
        yield Finding(("labelKey",), "is the column of the prompt", "another column, or null")
    if source.image_key is not None and source.image_key in (source.prompt_key, source.label_key):
        yield Finding(("imageKey",), "is the column of the prompt or the label", "another column, or null")
    one_file = (
        source.synthetic is not None or source.seeds is not None or (source.path or "").endswith((".jsonl", ".parquet"))
    )
    if one_file:
        for field, default in _OF_A_DATASET.items():
            if getattr(source, field) != default:
                yield Finding((field,), "applies to dataset folders and hub ids alone", "leave it out")
    for field, defaults in _OF_ROWS.items() if source.seeds is not None else ():
        if getattr(source, snake(field)) not in defaults:
            yield Finding((field,), "names a column, and seeds have none", "leave it out beside seeds")


def _sources(data: Any) -> Iterator[Finding]:
    if not data.sources:
        yield from _source(data)
        return
    for field, default in _OF_EACH_SOURCE.items():
        if getattr(data, snake(field)) != default:
            yield Finding((field,), "has no effect beside sources", "in each of the sources")
    seen: dict[str, int] = {}
    for i, source in enumerate(data.sources):
        name = source.name or (PurePosixPath(source.path).stem if source.path else None)
        if name is not None and name in seen and (source.name is None or data.sources[seen[name]].name is None):
            wrong = f"is called {name!r} in metrics as sources[{seen[name]}] is"
            yield Finding(("sources", i), wrong, "a name of its own for each source")
        elif name is not None:
            seen[name] = i


def _evaluation(evaluation: Any) -> Iterator[Finding]:
    sets = enumerate(evaluation.sets or [])
    for at, source in [(("data",), evaluation.data), *((("sets", i), one) for i, one in sets)]:
        if source is not None and source.weight != 1.0:
            yield Finding((*at, "weight"), "an evaluation takes every prompt once", "leave it out")


def _held_out_seeds(spec: Any) -> Iterator[Finding]:
    """Seeds of an evaluation that the same environment has in training."""
    for place, held_out in held_out_sources(spec):
        if held_out.seeds is None:
            continue
        for _, source in data_sources(spec):
            if source.seeds is None or not _same_environment(source.environment, held_out.environment):
                continue
            first, last = source.seeds.first, source.seeds.first + source.seeds.count - 1
            if held_out.seeds.first <= last and first < held_out.seeds.first + held_out.seeds.count:
                at = (*parts_of(place), "seeds")
                yield Finding(at, "are seeds of the training data too", f"others than {first} to {last}")


def _same_environment(one: Any, other: Any) -> bool:
    if one is None or other is None or (one.name, one.python) != (other.name, other.python):
        return False
    ids = [environment.gymnasium and environment.gymnasium.id for environment in (one, other)]
    urls = [environment.openenv and environment.openenv.url for environment in (one, other)]
    return bool(one.args == other.args and ids[0] == ids[1] and urls[0] == urls[1])


SOURCE_CHECKS: dict[type, tuple[Check, ...]] = {
    ModelSpec: (_model, one_line("revision")),
    CriticModelSpec: (_other_model,),
    TeacherSpec: (_other_model,),
    JudgeModel: (_other_model,),
    ChatSpec: (_chat,),
    DataSource: (_source, one_line(*_OF_SOURCES)),
    DataSpec: (_sources, one_line(*_OF_SOURCES)),
    EvaluationSet: (_source, one_line(*_OF_SOURCES)),
    EvaluationSpec: (_evaluation,),
    RLJobSpec: (_held_out_seeds,),
}
