"""Names, paths, variables and arguments: what they may hold, checked where a manifest is read."""

from __future__ import annotations

import difflib
import keyword
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from rljob_api import kubernetes_names as names
from rljob_api.derived import max_sequences
from rljob_api.engine_arguments import value_faults
from rljob_api.how_many import how_many
from rljob_api.job import ObjectMeta, RLJob
from rljob_api.quantities import to_number
from rljob_api.queue_label import QUEUE_LABEL, labelled_queue, queue_conflict
from rljob_api.rewards import BUILTIN_REWARDS, argument_faults, token_limit
from rljob_api.rules.findings import (
    NAME,
    Check,
    Finding,
    address_fault,
    keys,
    labels,
    named_object,
    object_name,
    unprintable,
)
from rljob_api.spec import (
    ChatSpec,
    CheckpointSpec,
    CriticModelSpec,
    DataSource,
    DataSpec,
    EnvironmentSpec,
    EvaluationSet,
    EvaluationSpec,
    FailureRule,
    GymnasiumSpec,
    Hub,
    JudgeEndpoint,
    JudgeModel,
    ModelSpec,
    OpenEnvSpec,
    OversamplingSpec,
    PodResources,
    ProfileOverrides,
    QueueSystem,
    RecordsSpec,
    RewardPart,
    RewardSpec,
    RLJobSpec,
    RolloutSpec,
    SchedulingSpec,
    StorageSpec,
    TeacherSpec,
    TextEnvironmentSpec,
    TrackerSpec,
    VolumeSpec,
)
from rljob_api.spec.episodes import PYTHON_OBJECT
from rljob_api.wire.names import ATTEMPT_VARIABLE, PRIVATE_VARIABLES

_RESERVED_ARGUMENTS = ("prompt", "response", "label", "finish_reason")
NEVER_GIVEN = ("PYTHONHOME", *PRIVATE_VARIABLES, ATTEMPT_VARIABLE)
FUNCTION = "package.module:function, or ./file.py:function"
_FOLDERS = ("PATH", "HOME", "TMPDIR", "TMP", "TEMP", "RAY_TMPDIR")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
_VOLUME_SOURCES = (
    *("awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "configMap", "csi", "downwardAPI"),
    *("emptyDir", "ephemeral", "fc", "flexVolume", "flocker", "gcePersistentDisk", "gitRepo", "glusterfs", "hostPath"),
    *("image", "iscsi", "nfs", "persistentVolumeClaim", "photonPersistentDisk", "portworxVolume", "projected"),
    *("quobyte", "rbd", "scaleIO", "secret", "storageos", "vsphereVolume"),
)
_RAY_PORTS = {6379: "GCS", 8265: "dashboard", 10001: "client server", 52365: "agent"}
_AGENT_ARGUMENTS = ("base_url", "token", "row")
_MOST_AGENTS = 400
_LEAST_MEMORY = 64 * 2**20
_SCHEME = re.compile("[A-Za-z][A-Za-z0-9+.-]*://")
_FILES = {".csv", ".tsv", ".txt", ".json", ".gz", ".zip", ".zst", ".xlsx", ".arrow", ".pickle", ".pkl"}
_WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".json"}
_ENGINE_ARGUMENT = re.compile("[a-z][a-z0-9_]*")
_GYMNASIUM_ID = re.compile(r"([A-Za-z_][\w.]*:)?([\w-]+/)?[\w.-]+")
_PART = "[a-z0-9]+([._-]+[a-z0-9]+)*"
_HOST = "(localhost|([A-Za-z0-9-]+[.])+[A-Za-z0-9-]+|[A-Za-z0-9.-]+(?=:))(:[0-9]+)?/"
_IMAGE = re.compile(rf"({_HOST})?{_PART}(/{_PART})*(:[\w.-]{{1,128}})?(@[\w:.+-]+)?")


def _path(field: str, path: str | None, what: str, suffixes: set[str]) -> Iterator[Finding]:
    if path is None:
        return
    if not path.strip() or unprintable(path):
        yield Finding((field,), "is no path: it is empty or holds control characters", what)
    elif path != path.strip():
        yield Finding((field,), "has blanks around it", what)
    elif _SCHEME.match(path):
        yield Finding((field,), "addresses are not read: mount the storage, or name a hub id", what)
    elif PurePosixPath(path).suffix.lower() in suffixes:
        yield Finding((field,), f"{PurePosixPath(path).suffix} files are not read", what)


def _model(model: Any) -> Iterator[Finding]:
    yield from _path(
        "path", model.path, "a folder with config.json, *.safetensors and tokenizer, or a hub id", _WEIGHTS
    )
    local = model.path is None or model.path.startswith(("/", "~", "."))
    if local and model.hub != Hub.HUGGING_FACE:
        yield Finding(("hub",), "nothing is fetched from a hub", "only with a path that is a hub id")
    if model.path is not None and local and model.revision is not None:
        yield Finding(("revision",), "a local folder has no revisions", "only with a path that is a hub id")


def _other_model(model: Any) -> Iterator[Finding]:
    yield from _path("path", model.path, "a folder with config.json and *.safetensors, or a hub id", _WEIGHTS)


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


def _chat(chat: Any) -> Iterator[Finding]:
    yield from _path("templateFile", chat.template_file, "a Jinja file", set())
    for name in chat.template_args:
        if name in _GIVEN_TO_TEMPLATES:
            yield Finding(("templateArgs", name), "is given to every template already", "another name")
        elif not name.isidentifier():
            yield Finding(("templateArgs", name), "is no name of a variable", "letters, digits and '_'")


def _snake(name: str) -> str:
    return re.sub("([A-Z])", lambda m: "_" + m[1].lower(), name)


def _source(source: Any) -> Iterator[Finding]:
    what = "a .jsonl or .parquet file, a folder written by save_to_disk, or a hub id"
    yield from _path("path", source.path, what, _FILES)
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
        if getattr(source, _snake(field)) not in defaults:
            yield Finding((field,), "names a column, and seeds have none", "leave it out beside seeds")


def _sources(data: Any) -> Iterator[Finding]:
    if not data.sources:
        yield from _source(data)
        return
    for field, default in _OF_EACH_SOURCE.items():
        if getattr(data, _snake(field)) != default:
            yield Finding((field,), "has no effect beside sources", "in each of the sources")
    seen: dict[str, int] = {}
    for i, source in enumerate(data.sources):
        name = source.name or (PurePosixPath(source.path).stem if source.path else None)
        if name is not None and name in seen and (source.name is None or data.sources[seen[name]].name is None):
            wrong = f"is called {name!r} in metrics as sources[{seen[name]}] is"
            yield Finding(("sources", i), wrong, "a name of its own for each source")
        elif name is not None:
            seen[name] = i


_Function = tuple[tuple[str | int, ...], Any]


def _evaluation(evaluation: Any) -> Iterator[Finding]:
    for place, source in _held_out(evaluation):
        if source.weight != 1.0:
            yield Finding((*place, "weight"), "an evaluation takes every prompt once", "leave it out")


def _held_out(evaluation: Any) -> list[_Function]:
    """The data sets of an evaluation, each with its place."""
    if evaluation.data is not None:
        return [(("data",), evaluation.data)]
    return [(("sets", i), source) for i, source in enumerate(evaluation.sets or [])]


def _reward(reward: Any) -> Iterator[Finding]:
    if to_number(reward.memory) < _LEAST_MEMORY:
        yield Finding(("memory",), "is too little for a process that imports Python", "at least 64Mi")
    if reward.error_score != 0 and reward.on_error != "Score":
        yield Finding(("errorScore",), "has no effect with onError: Fail", "only with onError: Score")
    for i, name in enumerate(reward.environment):
        if name in NEVER_GIVEN:
            yield Finding(("environment", i), f"{name} is never given to a reward", "another variable")
    if reward.parts is not None and reward.args:
        yield Finding(("args",), "has no effect beside parts", "in each of the parts")
    yield from _function(reward)


def _text_environment(environment: Any) -> Iterator[Finding]:
    if to_number(environment.memory) < _LEAST_MEMORY:
        yield Finding(("memory",), "is too little for a process that imports Python", "at least 64Mi")
    for i, name in enumerate(environment.environment):
        if name in NEVER_GIVEN:
            yield Finding(("environment", i), f"{name} is never given to an environment", "another variable")
    if environment.gymnasium is not None and environment.args:
        yield Finding(("args",), "has no effect beside gymnasium", "gymnasium.kwargs")
    yield from named_object(("python",), environment.python, "package.module:Class, or ./file.py:Class")
    if environment.tools is not None and environment.args:
        yield Finding(("args",), "has no effect beside tools", "no args")
    if environment.openenv is not None:
        yield from _openenv(environment)
    if environment.agent is not None:
        yield from _agent(environment)
    for i, tool in enumerate(environment.tools or []):
        yield from named_object(("tools", i, "python"), tool.python, FUNCTION)
        for k, part in enumerate([] if tool.mcp is None else tool.mcp.command):
            if k == 0 and "/" not in part and (not part.strip() or len(part.split()) > 1):
                wrong = "is no program: each of its arguments is an item of the list"
                yield Finding(("tools", i, "mcp", "command", k), wrong, '["python", "server.py"]')
            if "\0" in part:
                yield Finding(("tools", i, "mcp", "command", k), "holds a NUL character", "a program, or an argument")
    for name in environment.args if environment.python is not None or environment.agent is not None else ():
        if name == "self" and environment.python is not None:
            yield Finding(("args", name), "is what Python calls the object itself", "another name")
        elif not name.isidentifier() or keyword.iskeyword(name):
            yield Finding(("args", name), "is no name of an argument", "letters, digits and '_', no word of Python's")


def _function(reward: Any) -> Iterator[Finding]:
    if reward.name is not None:
        for key, wrong, allowed in argument_faults(reward.name, reward.args):
            yield Finding(("args", key), wrong, allowed)
    yield from named_object(("python",), reward.python, FUNCTION)
    for name in reward.args if reward.python is not None else ():
        if name in _RESERVED_ARGUMENTS:
            yield Finding(("args", name), "is given to every reward function already", "another name")
        elif not name.isidentifier() or keyword.iskeyword(name):
            yield Finding(("args", name), "is no name of an argument", "letters, digits and '_', no word of Python's")


def _oversampling(oversampling: Any) -> Iterator[Finding]:
    yield from named_object(("function",), oversampling.function, FUNCTION)


def reward_functions(spec: Any) -> Iterator[tuple[_Function, _Function]]:
    """Each function that scores, with its place, and each source that it scores, with its own."""
    sources: list[_Function] = [(("data", "sources", i), source) for i, source in enumerate(spec.data.sources)]
    sources = sources or [(("data",), spec.data)]
    if spec.evaluation is not None:
        sources += [(("evaluation", *place), source) for place, source in _held_out(spec.evaluation)]
    for at, source in sources:
        reward = source.reward or spec.reward
        where = (*at, "reward") if source.reward else ("reward",)
        if reward is not None:
            parts = [((*where, "parts", i), part) for i, part in enumerate(reward.parts or [])]
            for function in parts or [(where, reward)]:
                yield function, (at, source)


def _rewards(spec: Any) -> Iterator[Finding]:
    """Built-in rewards that do not fit a source or the rollout."""
    seen = set()
    for (place, function), (at, source) in reward_functions(spec):
        facts = BUILTIN_REWARDS.get(function.name)
        if getattr(function, "rows", None):
            # It may score no row of this source: the rows tell.
            facts = None
        if facts is not None and facts.compares and source.label_key is None:
            wrong = f"compares with a label, but labelKey of {'.'.join(map(str, at))} is null"
            yield Finding((*place, "name"), wrong, "a labelKey")
        elif facts is not None and facts.compares and source.seeds is not None:
            wrong = f"compares with a label, and seeds, which {'.'.join(map(str, at))} has, have none"
            yield Finding((*place, "name"), wrong, "environment, format, length, overlong or a function")
        if function.name == "environment" and source.environment is None and not getattr(function, "rows", None):
            wrong = f"is the reward of an environment, and {'.'.join(map(str, at))} has none"
            yield Finding((*place, "name"), wrong, "another reward for this source")
        elif function.name == "environment" and source.environment is not None and source.environment.tools is not None:
            wrong = f"is 0 in each episode of {'.'.join(map(str, at))}, whose environment is tools"
            yield Finding((*place, "name"), wrong, "a reward of the last answer: exact, math or a function")
        if function.name == "match" and source.environment is not None:
            wrong = f"compares tokens of one response, and an episode of {'.'.join(map(str, at))} has several"
            yield Finding((*place, "name"), wrong, "exact, math or a function, which get its last answer")
        if function.name in ("length", "overlong") and source.environment is not None and "limit" not in function.args:
            wrong = f"needs a limit: an episode of {'.'.join(map(str, at))} has no one response that it could be of"
            yield Finding((*place, "args"), wrong, "limit: TOKENS, of all answers of an episode together")
        cache = function.args.get("cache")
        if function.name == "overlong" and place not in seen and isinstance(cache, int):
            limit = token_limit(function.args, spec.rollout.max_response_tokens)
            if cache > limit:
                wrong = "every response would be punished"
                yield Finding((*place, "args", "cache"), wrong, f"at most the limit, {limit} tokens")
        seen.add(place)


def _agent(environment: Any) -> Iterator[Finding]:
    if re.fullmatch(PYTHON_OBJECT, environment.agent.python):
        yield from named_object(("agent", "python"), environment.agent.python, FUNCTION)
    else:
        yield Finding(("agent", "python"), "names no function", FUNCTION)
    for name in environment.args:
        if name in _AGENT_ARGUMENTS:
            yield Finding(("args", name), "is given to every agent already", "another name")
    if not environment.network:
        wrong = "false leaves it no loopback address, on which it calls the policy"
        yield Finding(("network",), wrong, "true (a NetworkPolicy closes the pod's network)")
    if environment.deterministic:
        wrong = "an agent that was lost is not made anew by what was answered"
        yield Finding(("deterministic",), wrong, "false with agent")
    if environment.per_process > _MOST_AGENTS:
        wrong = "is more than a process has files for: each call of an agent holds two of 1,024"
        yield Finding(("perProcess",), wrong, f"{_MOST_AGENTS} at most, and more processes")
    for i, field in enumerate(environment.agent.ignore):
        if field in environment.agent.ignore[:i]:
            yield Finding(("agent", "ignore", i), "is there already", "each field once")


def _openenv(environment: Any) -> Iterator[Finding]:
    if environment.args:
        yield Finding(("args",), "has no effect beside openenv", "no args")
    if not environment.network:
        yield Finding(("network",), "false keeps its server from being reached", "true")
    if environment.openenv.wait_seconds >= environment.reset_seconds:
        wrong = "is not over when a reset has to be"
        yield Finding(("openenv", "waitSeconds"), wrong, f"less than resetSeconds, {environment.reset_seconds:g}")


def _held_out_seeds(spec: Any) -> Iterator[Finding]:
    """Seeds of an evaluation that the same environment has in training."""
    sources = spec.data.sources or [spec.data]
    for place, held_out in _held_out(spec.evaluation) if spec.evaluation is not None else ():
        for source in sources if held_out.seeds is not None else ():
            if source.seeds is None or not _same_environment(source.environment, held_out.environment):
                continue
            first, last = source.seeds.first, source.seeds.first + source.seeds.count - 1
            if held_out.seeds.first <= last and first < held_out.seeds.first + held_out.seeds.count:
                at = ("evaluation", *place, "seeds")
                yield Finding(at, "are seeds of the training data too", f"others than {first} to {last}")


def _same_environment(one: Any, other: Any) -> bool:
    if one is None or other is None or (one.name, one.python) != (other.name, other.python):
        return False
    ids = [environment.gymnasium and environment.gymnasium.id for environment in (one, other)]
    urls = [environment.openenv and environment.openenv.url for environment in (one, other)]
    return bool(one.args == other.args and ids[0] == ids[1] and urls[0] == urls[1])


def _environment(environment: Any) -> Iterator[Finding]:
    for field in ("variables", "trainer", "rollout"):
        yield from _variables((field,), getattr(environment, field))
    for i, path in enumerate(environment.python_path):
        if not path.strip() or unprintable(path) or ":" in path:
            yield Finding(("pythonPath", i), "is no folder: empty, or with ':' or control characters", "one path each")
    for i, name in enumerate(environment.secrets):
        yield from object_name(("secrets", i), name, "secret")


def _variables(at: tuple[str, ...], values: dict[str, str]) -> Iterator[Finding]:
    for name, value in values.items():
        if not names.is_variable(name):
            yield Finding((*at, name), "is no name of a variable", "letters, digits, '_', '-' and '.', no digit first")
        elif name in _THREADS and not re.fullmatch("[1-9][0-9]{0,3}", value):
            yield Finding((*at, name), "is no number of threads", "1 to 9999, in quotation marks")
        elif name in _FOLDERS and not any(part.startswith("/") for part in value.split(":")):
            yield Finding((*at, name), "names no folder, and processes need one", "an absolute path, or leave it out")
        elif "\0" in value:
            yield Finding((*at, name), "holds a NUL, which no variable can", "text without it")


def _overrides(overrides: Any) -> Iterator[Finding]:
    yield from _variables(("environment",), overrides.environment)
    yield from labels(("nodeSelector",), overrides.node_selector)


_MOST_ANNOTATIONS = 256 * 1024
"""Bytes of all keys and values (apimachinery's TotalAnnotationSizeLimitB)."""


def _metadata(metadata: Any) -> Iterator[Finding]:
    if metadata.namespace is not None and not names.is_dns_label(metadata.namespace):
        allowed = "at most 63 lower-case letters, digits and '-', a letter or digit first and last"
        yield Finding(("namespace",), "is no name of a namespace", allowed)
    yield from labels(("labels",), metadata.labels)
    yield from keys(("annotations",), metadata.annotations)
    size = sum(len(text.encode()) for pair in (metadata.annotations or {}).items() for text in pair)
    if size > _MOST_ANNOTATIONS:
        yield Finding(("annotations",), f"are {size} bytes together", f"at most {_MOST_ANNOTATIONS} bytes")


def _scheduling(scheduling: Any) -> Iterator[Finding]:
    yield from labels(("nodeSelector",), scheduling.node_selector)
    yield from object_name(("priorityClass",), scheduling.priority_class, "priority class")
    if scheduling.queue is not None and not (scheduling.queue and names.is_label_value(scheduling.queue)):
        yield Finding(("queue",), "is no name of a queue", "at most 63 letters, digits, '-', '_' and '.'")
    known = ("nodeAffinity", "podAffinity", "podAntiAffinity")
    for key in scheduling.affinity:
        if key not in known:
            yield Finding(("affinity", key), "is no field of an affinity", ", ".join(known))


def _volume(volume: Any) -> Iterator[Finding]:
    for field, path in (("mountPath", volume.mount_path), ("hostPath", volume.host_path)):
        if path is not None and (":" in path or unprintable(path) or ".." in path.split("/")):
            yield Finding((field,), "is no path to mount", "absolute, without ':' and '..'")
    if volume.mount_path.strip("/") == "":
        yield Finding(("mountPath",), "would hide the whole image", "a folder below /")
    sub_path = volume.sub_path
    if sub_path is not None and (sub_path.startswith("/") or ".." in sub_path.split("/") or unprintable(sub_path)):
        yield Finding(("subPath",), "is no folder inside a volume", "relative, without '..'")
    yield from object_name(("claim",), volume.claim, "persistent volume claim")
    source = volume.source
    if source is not None and len(source) != 1:
        yield Finding(("source",), "is no source of a volume", "exactly one, like {nfs: {server: ..., path: ...}}")
    for kind, value in source.items() if source is not None and len(source) == 1 else ():
        if kind not in _VOLUME_SOURCES:
            near = difflib.get_close_matches(kind, _VOLUME_SOURCES, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            yield Finding(("source", kind), f"is no source of a volume{hint}", ", ".join(_VOLUME_SOURCES))
        elif not isinstance(value, dict):
            yield Finding(("source", kind), "is no mapping", "a mapping, as in a pod")


def _is_ipv4(host: str) -> bool:
    parts = host.split(".")
    return len(parts) == 4 and all(part.isdecimal() and int(part) < 256 for part in parts)


def _records(records: Any) -> Iterator[Finding]:
    if records.http_port in _RAY_PORTS:
        wrong = f"is the port of Ray's {_RAY_PORTS[records.http_port]} on the same machine"
        yield Finding(("httpPort",), wrong, "another port, or 0 for a free one")
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f:.]+", records.http_host) or re.fullmatch(
        r"[^:]*:[0-9]+", records.http_host
    ):
        yield Finding(("httpHost",), "is no address or host name", "like 127.0.0.1, without scheme and port")
    elif re.fullmatch("[0-9.]+", records.http_host) and not _is_ipv4(records.http_host):
        yield Finding(("httpHost",), "is no address: four numbers up to 255 are one", "like 127.0.0.1")


def _engine_arguments(rollout: Any) -> Iterator[Finding]:
    for name in rollout.engine_args:
        if not _ENGINE_ARGUMENT.fullmatch(name):
            yield Finding(("engineArgs", name), "is no name of an engine argument", "like max_model_len, with '_'")
    for name, wrong, allowed in value_faults(rollout.engine_args):
        yield Finding(("engineArgs", name), wrong, allowed)


def _batch(spec: Any) -> Iterator[Finding]:
    """vLLM's scheduler takes a token of each sequence in a step."""
    tokens = spec.rollout.max_batched_tokens
    if tokens is not None and tokens < (sequences := max_sequences(spec)):
        wrong = f"is less than the {how_many(sequences, 'sequence')} that an engine runs at once (rollout.maxNumSeqs)"
        yield Finding(("rollout", "maxBatchedTokens"), wrong, f"at least {sequences}")


def _generated(spec: Any) -> Iterator[Finding]:
    """Generated prompts, whose words are tokens of a random model's tokenizer, and the bound on prompts."""
    random, most = spec.model.random, spec.data.max_prompt_tokens
    if random is None or random.tokenizer.kind != "Word" or most is None:
        return
    sources: list[_Function] = [(("data", "sources", i), source) for i, source in enumerate(spec.data.sources)]
    for at, source in sources or [(("data",), spec.data)]:
        if source.synthetic is not None and source.synthetic.prompt_symbols > most:
            wrong = f"every prompt would be skipped: data.maxPromptTokens is {most}"
            yield Finding((*at, "synthetic", "promptSymbols"), wrong, f"at most {most}")


def _length(spec: Any) -> Iterator[Finding]:
    """An engine's own length, which prompts and responses have to fit into."""
    length = spec.rollout.engine_args.get("max_model_len")
    if type(length) is not int:
        return
    wanted = {"rollout.maxResponseTokens": spec.rollout.max_response_tokens}
    if spec.evaluation is not None and spec.evaluation.max_response_tokens is not None:
        wanted["evaluation.maxResponseTokens"] = spec.evaluation.max_response_tokens
    field = max(wanted, key=lambda name: wanted[name])
    generated = [s.synthetic.prompt_symbols for s in spec.data.sources or [spec.data] if s.synthetic is not None]
    random = spec.model.random
    # A word is a token there; elsewhere prompts are known once they are tokenised.
    prompt = max(generated, default=1) if random is not None and random.tokenizer.kind == "Word" else 1
    at = ("rollout", "engineArgs", "max_model_len")
    if length < wanted[field] + prompt:
        least = wanted[field] + prompt
        yield Finding(at, f"leaves no room for prompts beside {field} ({wanted[field]})", f"at least {least}")
    elif spec.episodes is not None and length < spec.episodes.max_tokens:
        yield Finding(at, "is less than episodes.maxTokens", f"at least {spec.episodes.max_tokens}")
    elif spec.data.max_prompt_tokens is not None and length < spec.data.max_prompt_tokens + wanted[field]:
        least = spec.data.max_prompt_tokens + wanted[field]
        yield Finding(at, f"is less than data.maxPromptTokens and {field} together", f"at least {least}")


def _image(spec: Any) -> Iterator[Finding]:
    if spec.image is not None and not _IMAGE.fullmatch(spec.image):
        yield Finding(("image",), "is no image", "like registry.example/name:tag, the name in lower case")


def _checkpoint(checkpoint: Any) -> Iterator[Finding]:
    yield from _path("path", checkpoint.path, "a folder that all nodes see", set())


def _zero(field: str, least: str) -> Check:
    def check(block: Any) -> Iterator[Finding]:
        value = getattr(block, _snake(field))
        if value is not None and to_number(value) < to_number(least):
            yield Finding((field,), "is too little", f"at least {least}")

    return check


def _cpu(resources: Any) -> Iterator[Finding]:
    if resources.cpu is not None and float(resources.cpu.rstrip("m")) == 0:
        yield Finding(("cpu",), "is no processor at all", "above 0, like 32 or 500m")


def _queue_label(job: Any) -> Iterator[Finding]:
    queue, scheduling = labelled_queue(job.metadata.labels), job.spec.scheduling
    if scheduling.system == QueueSystem.KUEUE and scheduling.queue is None and queue is None:
        text = f"is missing: Kueue admits nothing without the name of a queue, here or in the label {QUEUE_LABEL}"
        yield Finding(("spec", "scheduling", "queue"), text, NAME)
    conflict = queue_conflict(job.spec, queue) if queue is not None else ""
    if conflict:
        at = ("metadata", "labels", QUEUE_LABEL)
        yield Finding(at, f"is a queue of Kueue, and {conflict}", "one of the two, or both with the same queue")


def _one_line(*fields: str) -> Check:
    """Names that stand in tables, labels and addresses."""

    def check(block: Any) -> Iterator[Finding]:
        for field in fields:
            value = getattr(block, _snake(field))
            if value is not None and (not value.strip() or unprintable(value)):
                yield Finding((field,), "is blank, or holds control characters", "a name in one line")

    return check


def _gymnasium(gymnasium: Any) -> Iterator[Finding]:
    if not _GYMNASIUM_ID.fullmatch(gymnasium.id):
        yield Finding(("id",), "is no id of gymnasium", "like FrozenLake-v1, or package.module:Name-v0")
    for name in gymnasium.made_with:
        if name == "id":
            yield Finding(("kwargs", name), "is given to gymnasium.make already", "another name")
        elif name == "render_mode" and gymnasium.made_with[name] == "human":
            yield Finding(("kwargs", name), "opens a window, and returns no text", "ansi, or leave it out")
        elif not name.isidentifier() or keyword.iskeyword(name):
            yield Finding(("kwargs", name), "is no name of an argument", "letters, digits and '_', no word of Python's")


def _openenv_address(openenv: Any) -> Iterator[Finding]:
    if wrong := address_fault(openenv.url):
        yield Finding(("url",), wrong, "like http://server:8000")
    elif openenv.url.rstrip("/").endswith("/ws"):
        yield Finding(("url",), "ends with /ws, which is added to it", "the address before it")


_OF_SOURCES = ("subset", "split", "promptKey", "labelKey", "imageKey")
TEXT_CHECKS: dict[type, tuple[Check, ...]] = {
    RLJob: (_queue_label,),
    ObjectMeta: (_metadata,),
    ModelSpec: (_model, _one_line("revision")),
    CriticModelSpec: (_other_model,),
    TeacherSpec: (_other_model,),
    JudgeModel: (_other_model,),
    ChatSpec: (_chat,),
    DataSource: (_source, _one_line(*_OF_SOURCES)),
    DataSpec: (_sources, _one_line(*_OF_SOURCES)),
    EvaluationSet: (_source, _one_line(*_OF_SOURCES)),
    GymnasiumSpec: (_gymnasium,),
    OpenEnvSpec: (_one_line("action", "observation"), _openenv_address),
    JudgeEndpoint: (_one_line("model"),),
    TrackerSpec: (_one_line("project", "run", "workspace"),),
    FailureRule: (_one_line("name"),),
    TextEnvironmentSpec: (_text_environment,),
    EvaluationSpec: (_evaluation,),
    RewardPart: (_function,),
    RewardSpec: (_reward, _one_line("by")),
    RLJobSpec: (_rewards, _held_out_seeds, _image, _length, _batch, _generated),
    RolloutSpec: (_engine_arguments,),
    OversamplingSpec: (_oversampling,),
    EnvironmentSpec: (_environment,),
    ProfileOverrides: (_overrides,),
    SchedulingSpec: (_scheduling,),
    StorageSpec: (_zero("sharedMemory", "64Mi"),),
    VolumeSpec: (_volume,),
    RecordsSpec: (_records,),
    CheckpointSpec: (_checkpoint,),
    PodResources: (_cpu, _zero("memory", "256Mi")),
}
