"""Bad paths, files and options of each command: named at once, before anything is started or left behind."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clocks import at_once

from rljob_worker.cli.main import main

ROOT = Path(__file__).parents[3]
JOB = str(ROOT / "examples" / "quickstart.yaml")
OLD_RUN = ROOT / "tests" / "worker" / "records" / "old_run"
CONFIG = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
LONG = "a" * 300
WEIGHTS = b"\2" + bytes(7) + b"{}"
"""A safetensors file of no tensors."""
FILES = {
    "empty.jsonl": b"",
    "binary.jsonl": b"\xff\xfe{}",
    "question.jsonl": b'\n{"question": "a", "label": "b"}\n',
    "half.jsonl": b'{"prompt": "a \\ud83d b", "label": "b"}\n',
    "second.jsonl": b'{"prompt": "a", "label": "b"}\n' * 3 + b'{"prompt": "", "label": "b"}\n',
    "late.jsonl": b"[]\n" + b'{"prompt": "a", "label": "b"}\n',
    "tags.jsonl": b'{"prompt": "a", "label": "b", "tag": "m", "tests": {"inputs": [], "outputs": []}}\n',
    "text.parquet": b"no",
    "text.txt": b"no",
    "syntax.py": b"x = 1\ndef f(:\n",
    "values.py": b"f = 5\ndef again(): ...\nagain = [1]\ntable: dict = {}\n\nfine = 1\nfine = print\n",
    "scores.py": b"def score(response, label):\n    return 0\n",
    "asks.py": b"def score(response, tag, level, *, tests, more=1):\n    return 0\n",
    "filters.py": b"def wrong(rewards, level): ...\ndef placed(rewards, /): ...\nasync def later(rewards): ...\n",
    "places.py": b"def score(response, /):\n    return 0\n",
    "syntax.jinja": b"{{ messages }}\n{% for %}",
    "job.yaml": b"spec: [",
}
MODELS: dict[str, object] = {
    "llama": CONFIG | {"model_type": "llama"},
    "no type": {},
    "words": CONFIG | {"num_attention_heads": "four"},
    "null": CONFIG | {"hidden_size": None},
    "layers": CONFIG | {"num_hidden_layers": 10**9},
    "experts": CONFIG | {"model_type": "qwen3_moe", "num_experts": 4000, "num_hidden_layers": 999},
    "negative": CONFIG | {"hidden_size": -5},
    "heads": CONFIG | {"num_attention_heads": 5},
    "rope": CONFIG | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "quantized": CONFIG | {"quantization_config": {"bits": 4}},
    "gelu": CONFIG | {"hidden_act": "gelu"},
    "list": [],
    "no weights": CONFIG,
}
"""Folders with this config and a tokenizer."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the table names; `%` there is this folder."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "tokenizer.json").write_text("{}")
    for kind in ("pipe", "device", "folder", "torn"):
        shutil.copytree(folder / "no weights", folder / f"config {kind}")
        put(folder / f"config {kind}" / "config.json", kind)
    for file in ("tokenizer.json", "model.safetensors"):
        for kind in ("pipe", "device"):
            shutil.copytree(folder / "no weights", folder / f"{file} {kind}")
            (folder / f"{file} {kind}" / "model.safetensors").write_bytes(WEIGHTS)
            put(folder / f"{file} {kind}" / file, kind)
    shutil.copytree(folder / "no weights", folder / "whole")
    (folder / "whole" / "model.safetensors").write_bytes(WEIGHTS)
    for kind in ("torn", "folder", "link"):
        shutil.copytree(folder / "no weights", folder / f"weights {kind}")
        put(folder / f"weights {kind}" / "model.safetensors", kind)
    shutil.copytree(folder / "whole", folder / "index")
    (folder / "index" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "two.safetensors"}}')
    (folder / "no tokenizer").mkdir()
    (folder / "no tokenizer" / "config.json").write_text(json.dumps(CONFIG))
    for name in ("pipe", "pipe.jsonl", "pipe.py", "pipe.jinja", "pipe.yaml"):
        put(folder / name, "pipe")
    for name in ("device", "device.jsonl", "device.py", "device.jinja"):
        put(folder / name, "device")
    (folder / "nothing").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "loop.py").symlink_to("loop.py")
    shutil.copy(JOB, folder / "beside.yaml")
    shutil.copytree(OLD_RUN, folder / "old")
    shutil.copytree(OLD_RUN, folder / "several" / "a run")
    (folder / "sampled" / "trajectories").mkdir(parents=True)
    (folder / "sampled" / "trajectories" / "step-000012.jsonl.gz").touch()
    return folder


def put(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("nowhere")
    else:
        path.write_text("{")


def model(path: str) -> list[str]:
    return ["--set", "spec.model.random=null", "--set", f"spec.model.path={path}"]


def data(path: str) -> list[str]:
    return ["--set", "spec.data.synthetic=null", "--set", f"spec.data.path={path}"]


def template(path: str) -> list[str]:
    return ["--set", "spec.data.applyChatTemplate=true", "--set", f"spec.data.chat={{templateFile: '{path}'}}"]


def reward(path: str) -> list[str]:
    return ["--set", f"spec.reward={{python: '{path}'}}"]


def judge(prompt: str) -> list[str]:
    endpoint = "{url: 'http://127.0.0.1:9/v1', model: m}"
    judges = f'spec.judges=[{{name: a, endpoint: {endpoint}, prompt: "{prompt}"}}]'
    return ["--set", judges, "--set", "spec.reward={name: judge}"]


def part(path: str) -> list[str]:
    return ["--set", f"spec.reward={{parts: [{{name: match}}, {{python: '{path}'}}]}}"]


def code(tests: str) -> list[str]:
    return [*data("%/tags.jsonl"), "--set", f"spec.reward={{name: code, args: {{kind: Stdin, tests: {tests}}}}}"]


def group_filter(name: str) -> list[str]:
    return ["--set", f"spec.rollout.oversampling={{function: '%/filters.py:{name}'}}"]


FILTER = "spec.rollout.oversampling.function"
BY_KIND = ["--set", "spec.reward={by: kind, parts: [{name: match, rows: [m]}]}"]
OF_REWARDS: list[tuple[list[str], str]] = [
    (group_filter("wrong"), f"{FILTER}: '%/filters.py:wrong' asks for 'level', which is no column of the data; there"),
    ([*data("%/tags.jsonl"), *group_filter("wrong")], "there are label, prompt, rewards, tag, tests"),
    (group_filter("placed"), f"{FILTER}: '%/filters.py:placed' takes 'rewards' by position alone"),
    (group_filter("later"), f"{FILTER}: '%/filters.py:later' is async"),
    (reward("%/places.py:score"), "spec.reward.python: '%/places.py:score' takes 'response' by position alone"),
    (reward("%/asks.py:score"), "'%/asks.py:score' asks for 'tag', which is neither a column of the data nor in"),
    (BY_KIND, "spec.reward.by: spec.data.synthetic (spec.data) has no column 'kind'; the columns there are: 'label', "),
]
"""Parameters of functions, and columns, by `rljob run` and by `rljob validate`."""
SWEEP = ["--sweep", "spec.steps=1,2", "--output"]
NO_FILE = "is a pipe or device, not a file"
WANTED = "a folder with config.json, *.safetensors and tokenizer files, or the id of a hub"
OF_RUN: list[tuple[list[str], str]] = [
    # --- model ---------------------------------------------------------------------------------------
    (model("%/nowhere"), f"spec.model.path: %/nowhere does not exist; {WANTED}"),
    (model("./nowhere"), f"spec.model.path: nowhere does not exist; {WANTED}"),
    (model("a/b/c"), "spec.model.path: a/b/c does not exist"),
    (model("%/text.txt"), f"spec.model.path: %/text.txt is a file: {WANTED}"),
    (model("%/pipe"), "spec.model.path: %/pipe is a pipe or device"),
    (model(f"/{LONG}"), f"spec.model.path: /{LONG}: File name too long"),
    (model("%/loop"), "spec.model.path: %/loop: Too many levels of symbolic links"),
    (model("~nobody-of-this-name/x"), "spec.model.path: ~nobody-of-this-name/x: there is no such user"),
    (model("%/nothing"), "%/nothing/config.json: no such file; a model folder needs config.json"),
    (model("%/no tokenizer"), "spec.model.path: %/no tokenizer has no tokenizer: none of tokenizer*"),
    (model("%/no weights"), "spec.model.path: %/no weights: no weights: there is no *.safetensors file"),
    (model("%/tokenizer.json pipe"), f"%/tokenizer.json pipe/tokenizer.json: cannot be read: {NO_FILE}"),
    (model("%/tokenizer.json device"), f"%/tokenizer.json device/tokenizer.json: cannot be read: {NO_FILE}"),
    (model("%/model.safetensors pipe"), "%/model.safetensors pipe/model.safetensors is a pipe or device"),
    (model("%/model.safetensors device"), "%/model.safetensors device/model.safetensors is a pipe or device"),
    (model("%/weights torn"), "spec.model.path: %/weights torn/model.safetensors: not a readable safetensors file"),
    (model("%/weights folder"), "spec.model.path: %/weights folder/model.safetensors is a folder, not a file"),
    (model("%/weights link"), "spec.model.path: %/weights link/model.safetensors leads nowhere"),
    (
        model("%/index"),
        "spec.model.path: %/index/two.safetensors: no such file, but model.safetensors.index.json lists",
    ),
    (
        [*model("%/whole"), "--set", "spec.training={backend: FSDP, lora: {targets: [q_proj, query]}}"],
        "spec.training.lora.targets[1]: is no linear module of the model's layers; allowed: q_proj, k_proj",
    ),
    (
        [*model("%/whole"), "--set", "spec.rollout.stopTokenIds=[63, 64]"],
        "spec.rollout.stopTokenIds[1]: is no token of",
    ),
    (
        [*model("%/whole"), "--set", "spec.rollout.engineArgs={max_model_len: 513}"],
        "max_model_len: is more than the model",
    ),
    (
        [*model("%/whole"), "--set", "spec.rollout.maxResponseTokens=512"],
        "spec.rollout.maxResponseTokens: leaves no room",
    ),
    # --- data ----------------------------------------------------------------------------------------
    (data("%/empty.jsonl"), "spec.data.path: %/empty.jsonl is empty: it has no rows"),
    (data("%/binary.jsonl"), "%/binary.jsonl is UTF-16; JSON lines in UTF-8 are needed"),
    (data("%/question.jsonl"), "%/question.jsonl, line 2 (row 0): key 'prompt' (spec.data.promptKey) is absent"),
    (data("%/half.jsonl"), "%/half.jsonl, line 1: holds half a character (a lone surrogate like \\ud800)"),
    (data("%/late.jsonl"), "%/late.jsonl, line 1: a JSON object is needed, not list"),
    (data("%/second.jsonl"), "%/second.jsonl, line 4 (row 3): the prompt ('prompt') is empty"),
    (data("%/text.parquet"), "spec.data.path: %/text.parquet is not a readable Parquet file: it does not begin"),
    (data("%/nothing"), "spec.data.path: %/nothing is not a dataset folder written by save_to_disk"),
    (data("%/loop"), "spec.data.path: %/loop: Too many levels of symbolic links"),
    (data("~nobody-of-this-name/x.jsonl"), "spec.data.path: ~nobody-of-this-name/x.jsonl: there is no such user"),
    (
        [*data("%/tags.jsonl"), "--set", "spec.reward={by: kind, parts: [{name: exact, rows: [m]}]}"],
        "spec.reward.by: %/tags.jsonl (spec.data) has no column 'kind'; the columns there are: 'label', 'prompt'",
    ),
    (
        [*data("%/tags.jsonl"), "--set", "spec.reward={by: tag, parts: [{name: exact, rows: [other]}]}"],
        "%/tags.jsonl, row 0: tag is 'm', which is in no part's rows",
    ),
    (code("column"), "%/tags.jsonl, row 0: the row has no column 'column' (args.tests)"),
    (code("label"), "%/tags.jsonl, row 0: the text of the tests is no JSON"),
    (code("tests"), "%/tags.jsonl, row 0: there are no tests (args.tests)"),
    # --- templates and rewards -----------------------------------------------------------------------
    (template("/nowhere.jinja"), "spec.data.chat.templateFile: /nowhere.jinja does not exist"),
    (template("%/pipe.jinja"), "spec.data.chat.templateFile: %/pipe.jinja is not a file"),
    (template("%/device.jinja"), "spec.data.chat.templateFile: %/device.jinja is not a file"),
    (template("%/syntax.jinja"), "spec.data.chat.templateFile: %/syntax.jinja, line 2: no chat template: Expected an"),
    (template("~nobody-of-this-name/x"), "spec.data.chat.templateFile: ~nobody-of-this-name/x: there is no such user"),
    (reward("%/nowhere.py:score"), "spec.reward.python: %/nowhere.py does not exist"),
    (reward("./nowhere.py:score"), "spec.reward.python: ./nowhere.py: there is no file"),
    (reward("%/pipe.py:score"), f"spec.reward.python: %/pipe.py: {NO_FILE}"),
    (reward("%/device.py:score"), f"spec.reward.python: %/device.py: {NO_FILE}"),
    (reward("%/syntax.py:f"), "spec.reward.python: %/syntax.py, line 2: no Python: invalid syntax"),
    (reward("%/scores.py:scores"), "spec.reward.python: %/scores.py has no 'scores'; did you mean score?"),
    (reward("no_such_package.rewards:score"), "spec.reward.python: there is no module 'no_such_package'"),
    (
        [*data("%/tags.jsonl"), *reward("%/asks.py:score")],
        "spec.reward.python: '%/asks.py:score' asks for 'level', which is neither a column of the data nor in reward",
    ),
    (
        ["--set", "spec.reward={python: '%/scores.py:score', args: {lable: 1}}"],
        "spec.reward.args.lable: '%/scores.py:score' has no such parameter; did you mean 'label'?",
    ),
    (part("%/scores.py:scores"), "spec.reward.parts[1].python: %/scores.py has no 'scores'"),
    (reward("%/values.py:f"), "spec.reward.python: %/values.py, line 1: 'f' is no function or class, but a value"),
    (reward("%/values.py:again"), "spec.reward.python: %/values.py, line 3: 'again' is no function or class"),
    (part("%/values.py:table"), "spec.reward.parts[1].python: %/values.py, line 4: 'table' is no function or class"),
    (
        ["--set", "spec.rollout.oversampling={function: '%/values.py:f'}"],
        "spec.rollout.oversampling.function: %/values.py, line 1: 'f' is no function or class, but a value",
    ),
    (judge("{{ response"), "spec.judges[0].prompt: is no Jinja template: unexpected end of template"),
    (judge("{{ response | nosuch }}"), "spec.judges[0].prompt: is no Jinja template: No filter named 'nosuch'"),
    (judge("{{ label }}"), "spec.judges[0].prompt: does not show the response"),
    # --- folders that are written to -----------------------------------------------------------------
    (["--set", "spec.checkpoint.path=%/text.txt"], "%/text.txt: cannot be spec.checkpoint.path: %/text.txt is no"),
    (["--set", "spec.checkpoint.path=%/pipe/x"], "%/pipe/x: cannot be spec.checkpoint.path: %/pipe is no folder"),
    (["--set", f"spec.checkpoint.path=/{LONG}"], f"/{LONG}: cannot be spec.checkpoint.path: File name too long"),
    (["--set", "spec.checkpoint.path=%/loop"], "%/loop: cannot be spec.checkpoint.path: Too many levels"),
    (["--set", "spec.checkpoint.path=/proc/x"], "/proc/x: cannot be spec.checkpoint.path: No such file"),
    (["--output", f"%/new/{LONG}"], f"%/new/{LONG}: cannot be a run folder: File name too long"),
    (["--output", "%/" + "b/" * 2000], "cannot be a run folder: a path of 4"),
    (["--output", "%/text.txt/x"], "%/text.txt/x: cannot be a run folder: %/text.txt is no folder"),
    (["--output", "%/pipe"], "%/pipe: cannot be a run folder: %/pipe is no folder"),
    (["--output", "%/loop"], "%/loop: cannot be a run folder: Too many levels of symbolic links"),
    (["--output", "/proc/x"], "/proc/x: cannot be a run folder: No such file or directory"),
    (["--output", ""], "argument --output: is empty; name a folder"),
    # --- devices -------------------------------------------------------------------------------------
    (
        ["--set", "spec.resources={profile: ascend-a2}"],
        "spec.resources.profile: 'ascend-a2' cannot be used here: torch_",
    ),
    # --- options -------------------------------------------------------------------------------------
    (["--resume"], "--resume: %/run holds no run to continue; leave --resume out to begin one there"),
    (["--address", "127.0.0.1"], "--address: '127.0.0.1' is no address of a Ray cluster; HOST:PORT is"),
    (["--address", "a host:1"], "--address: 'a host:1' is no address of a Ray cluster"),
    (["--address", "localhost:99999"], "--address: 'localhost:99999' is no address of a Ray cluster"),
    (["--address", "no-such-host.invalid:6379"], "--address: no-such-host.invalid:6379: there is no host no-such-host"),
    (["--set", "spec.records.trackers=[{name: clearml}]"], "spec.records.trackers[0].name: clearml: its package is"),
    (["--set", "spec.rollout.engineArgs={max_model_lenn: 5}"], "spec.rollout.engineArgs.max_model_lenn: vLLM has no"),
    (["--set", "spec.records.httpHost=192.0.2.1"], "cannot listen on 192.0.2.1"),
    (["--set", f"metadata.name={'a' * 63}"], "is no name for a Ray cluster and its services; allowed: at most 47"),
]
OF_CONFIG = [
    ("config pipe", f"%/config pipe/config.json: cannot be read: {NO_FILE}"),
    ("config device", f"%/config device/config.json: cannot be read: {NO_FILE}"),
    ("config folder", "%/config folder/config.json: cannot be read: is a folder, not a file"),
    ("config torn", "%/config torn/config.json: not valid JSON"),
    ("llama", '%/llama/config.json: model_type: "llama": is not built; allowed: qwen2, qwen3, qwen3_moe, qwen3_5'),
    ("no type", "%/no type/config.json: model_type: null: is not built"),
    ("words", '%/words/config.json: num_attention_heads: "four": is no size'),
    ("null", "%/null/config.json: hidden_size: null: is no size"),
    (
        "layers",
        "%/layers/config.json: num_hidden_layers: 1000000000: is no size; allowed: whole number, at least 1 and at",
    ),
    ("experts", "%/experts/config.json: num_experts: 4000: is too many for 999 layers"),
    ("negative", "%/negative/config.json: hidden_size: -5: is no size"),
    ("heads", "%/heads/config.json: num_key_value_heads: 2: does not divide num_attention_heads (5)"),
    ("rope", "this rope is not built; allowed: rope_type: default"),
    ("quantized", "%/quantized/config.json: quantization_config: "),
    ("gelu", '%/gelu/config.json: hidden_act: "gelu": is not built; allowed: silu'),
    ("list", "%/list/config.json: must hold a JSON object, got list"),
]
OF_OTHERS: list[tuple[list[str], str]] = [
    (["validate", JOB, *model("%/loop")], "spec.model.path: %/loop: Too many levels of symbolic links"),
    (["validate", JOB, *model(f"/{LONG}")], f"spec.model.path: /{LONG}: File name too long"),
    (["validate", JOB, *model("~nobody-of-this-name/x")], "spec.model.path: ~nobody-of-this-name/x: there is no such"),
    (["validate", JOB, *model("../nowhere")], f"spec.model.path: ../nowhere does not exist; {WANTED}"),
    (["validate", JOB, *model("%/text.txt")], f"spec.model.path: %/text.txt is a file: {WANTED}"),
    (["validate", JOB, *model("%/nothing")], "%/nothing/config.json: no such file"),
    (["validate", JOB, *model("%/no tokenizer")], "spec.model.path: %/no tokenizer has no tokenizer"),
    (["validate", JOB, *model("%/no weights")], "spec.model.path: %/no weights: no weights"),
    (["validate", JOB, *reward("%/syntax.py:f")], "spec.reward.python: %/syntax.py, line 2: no Python"),
    (["validate", JOB, *reward("%/scores.py:scor")], "%/scores.py has no 'scor'; did you mean score?"),
    (
        ["validate", JOB, *data("%/tags.jsonl"), *part("%/asks.py:score")],
        "spec.reward.parts[1].python: '%/asks.py:score' asks for 'level'",
    ),
    (["validate", JOB, *reward("%/pipe.py:f")], "spec.reward.python: %/pipe.py: "),
    (["validate", "%/beside.yaml", *reward("./loop.py:f")], "spec.reward.python: ./loop.py: there is no file"),
    (["validate", "%/beside.yaml", *template("./loop.py")], "spec.data.chat.templateFile: ./loop.py: there is no file"),
    (["validate", JOB, *reward(f"./{LONG}.py:f")], f"spec.reward.python: ./{LONG}.py: there is no file"),
    (["validate", JOB, *data("./nowhere.jsonl")], "spec.data.path: nowhere.jsonl does not exist"),
    (["validate", JOB, *data("%/loop")], "spec.data.path: %/loop: Too many levels of symbolic links"),
    (
        ["validate", JOB, "--set", "spec.evaluation={data: {path: ../nowhere}}"],
        "spec.evaluation.data.path: ../nowhere does not exist",
    ),
    (["validate", JOB, *model("%/weights torn")], "%/weights torn/model.safetensors: not a readable safetensors"),
    (["validate", JOB, *code("column")], "spec.reward: 1 of 1 rows of spec.data cannot be tested by the reward code"),
    (
        ["validate", JOB, *data("%/tags.jsonl"), "--set", "spec.reward={by: kind, parts: [{name: exact, rows: [m]}]}"],
        "spec.reward.by: %/tags.jsonl (spec.data) has no column 'kind'",
    ),
    (["validate", "%/pipe.yaml"], "%/pipe.yaml: 1 problem\n  is a pipe that was not written to its end within 1.5 s"),
    (["validate", "%/device"], "%/device: 1 problem\n  is neither a file nor a pipe"),
    (["validate", "%/loop"], "%/loop: 1 problem\n  cannot be read: Too many levels of symbolic links"),
    (["validate", "%/nothing"], "%/nothing: 1 problem\n  is a folder; allowed: a file with an RLJob"),
    (["validate", "%/empty.jsonl"], "%/empty.jsonl: 1 problem\n  is empty; allowed: an RLJob"),
    (["validate", ""], "argument JOB.yaml: is empty; name a file"),
    (["validate", LONG], f"{LONG}: 1 problem\n  cannot be read: File name too long"),
    (["validate", JOB, "--set", ""], "--set : has no '='; allowed: PATH=VALUE"),
    (["validate", JOB, "--set", "=3"], "--set =3: has no path"),
    (["validate", JOB, "--set", "spec..steps=3"], "the path is malformed at '..steps'"),
    (["validate", JOB, "--set", "spec.steps=[[["], "the value is no YAML: line 1, column 4"),
    (["validate", JOB, "--set", "spec.steps[0]=3"], "spec.steps is no list"),
    (["validate", JOB, "--set", "spec.rollout.stop[99999999999999999999]=a"], "is beyond its end"),
    (["plan", JOB, "--device-memory", "0"], "--device-memory: '0' is no amount of memory; write it like 64Gi"),
    (["plan", JOB, "--device-memory", "1e999"], "--device-memory: '1e999' is no amount of memory"),
    (["plan", JOB, "--device-memory", "9" * 40 + "Gi"], "is no amount of memory"),
    (["plan", JOB, "--node-memory", "much"], "--node-memory: 'much' is no amount of memory"),
    (["plan", JOB, "--model", "%/nowhere"], "--model: %/nowhere: there is no such folder; a folder with the model's"),
    (
        ["plan", JOB, "--model", "%/text.txt"],
        "--model: %/text.txt: is no folder; a folder with the model's config.json",
    ),
    (["plan", JOB, "--model", "%/loop"], "--model: %/loop: there is no such folder"),
    (["plan", JOB, "--model", "%/nothing"], "%/nothing/config.json: no such file; a model folder needs config.json"),
    (["plan", JOB, "--model", ""], "argument --model: is empty; name a folder"),
    (["plan", JOB, "--model", "%/config pipe"], f"%/config pipe/config.json: cannot be read: {NO_FILE}"),
    (["plan", JOB, *model("/nowhere")], "spec.model.path: /nowhere is not on this machine; give a copy of its config"),
    (["plan", JOB, *model("%/text.txt")], "spec.model.path: %/text.txt is a file"),
    (
        ["import", "verl", "%/pipe"],
        f"%/pipe: {NO_FILE}: a script or",
    ),
    (["import", "trl", "%/device"], f"%/device: {NO_FILE}"),
    (["import", "slime", "%/loop"], "%/loop: Too many levels of symbolic links"),
    (["score", JOB, "--responses", "%/nowhere"], "--responses: %/nowhere: cannot be read: No such file"),
    (["score", JOB, "--responses", "%/pipe"], "--responses: %/pipe: cannot be read: is a pipe or device"),
    (
        ["score", JOB, "--responses", "%/sampled"],
        "--responses: %/sampled is a folder; name a file, like %/sampled/trajectories/step-000012.jsonl.gz",
    ),
    (["score", JOB, "--responses", "%/nothing"], "--responses: %/nothing is a folder; name a file, trajectories/step-"),
    (["score", JOB, "--responses", ""], "argument --responses: is empty; name a file"),
    (["score", JOB, "--responses", "%/empty.jsonl"], "--responses: %/empty.jsonl has no responses"),
    (["score", JOB, "--responses", "%/scores.py"], "%/scores.py, line 1: not valid JSON"),
    (["run", JOB, *SWEEP, "%/text.txt"], "--sweep: with spec.steps=1: %/text.txt/01-steps_1: cannot be a run folder"),
    (
        ["run", JOB, *SWEEP, "%/sweep", *model("%/pipe")],
        "--sweep: with spec.steps=1: spec.model.path: %/pipe is a pipe",
    ),
    (
        ["run", JOB, "--only", "train", "--from", "%/nothing"],
        "--from: %/nothing holds no rollout.json; needed is the run folder of `rljob run --only rollout`",
    ),
    (
        ["run", JOB, "--only", "train", "--from", "%/nowhere"],
        "--from: %/nowhere: there is no such folder; needed is the run folder of `rljob run --only rollout`",
    ),
    (
        ["run", JOB, "--only", "train", "--from", "%/text.txt"],
        "--from: %/text.txt: is no folder; needed is the run folder of `rljob run --only rollout`",
    ),
    (
        ["validate", str(ROOT / "examples" / "evaluation.yaml"), "--set", "spec.steps=5"],
        "spec.earlyStop.afterStep: 100: is no step before the last of the job's 5; allowed: 0 to 4, or no early stop: "
        "--set spec.earlyStop=null",
    ),
    (["env", "FrozenLake", "--tokenizer", "%/nothing"], "--tokenizer: %/nothing has no tokenizer: none of tokenizer*"),
    (["env", "FrozenLake", "--tokenizer", "%/text.txt"], "--tokenizer: %/text.txt: is no folder; a model's folder is"),
    (["env", "%/nothing:Game"], "environment.python: '%/nothing:Game' is of neither form: package.module:Class, FILE"),
    (["env", "%/nowhere.py:Game"], "environment.python: %/nowhere.py: there is no file %/nowhere.py"),
    (
        ["run", JOB, "--only", "rollout", "--checkpoint", "%/nothing"],
        "--checkpoint: %/nothing is no run folder and no checkpoint of one (step-N)",
    ),
    (["doctor", "%/pipe.yaml"], "is a pipe that was not written to its end"),
    (["doctor", "--ray", "a host"], "--ray: 'a host' is no address of a Ray cluster"),
    (["doctor", "--ray", "no-such-host.invalid:1"], "--ray: no-such-host.invalid:1: there is no host"),
    (["doctor", "--wanted", "{"], "--wanted: 1 validation error"),
    (["report", ""], "argument DIR: is empty; name a folder"),
    (["report", LONG], f"{LONG}: File name too long"),
    (["report", "%/text.txt"], "%/text.txt: is no folder; a run folder is needed"),
    (["report", "%/several"], "%/several: not a run folder (it has no run.json); it holds 1, of which the last is %/"),
    (["report", "%/old", "--beside", "%/nowhere"], "--beside: %/nowhere: there is no such folder; a run folder is"),
    (["view", "%/nothing"], "%/nothing: not a run folder (it has no run.json)"),
    (["view", "%/old", "--beside", "%/text.txt"], "--beside: %/text.txt: is no folder; a run folder is needed"),
    (["trace", "%/old", "--output", "%/nothing"], "--output: %/nothing: is a folder; name a file"),
    (["trace", "%/old", "--output", "%/pipe"], "--output: %/pipe: is a pipe or device; name a file"),
    (["trace", "%/old", "--output", "%/nowhere/a"], "--output: %/nowhere/a: there is no folder %/nowhere; make it"),
    (["trace", "%/old", "--output", ""], "argument -o/--output: is empty; name a file"),
    (["import", "verl", "%/syntax.py", "-o", "%/nowhere/a.yaml"], "--output: %/nowhere/a.yaml: there is no folder"),
    (["import", "verl", ""], "argument FILE: is empty; name a file"),
    (["audit", ""], "argument DIR: is empty; name a folder"),
    (["samples", "%/loop"], "%/loop: there is no such folder"),
    (["samples", "%/old", "--step", "-1"], "no trajectories"),
    (["samples", "%/old", "--worst", "-3"], "--worst: -3 is not a number of samples"),
    (["export", "%/nothing", "--to", "%/to"], "%/nothing: not a run folder (it has no run.json)"),
    (["export", "%/old", "--to", ""], "argument --to: is empty; name a folder"),
]
RUN = ["run", JOB, "--output", "%/run"]
CASES = [([*RUN, *argv], said) for argv, said in OF_RUN]
CASES += [([*RUN, *model(f"%/{name}")], said) for name, said in OF_CONFIG]
CASES += [(["plan", JOB, *model(f"%/{name}")], said) for name, said in OF_CONFIG]
CASES += [(["validate", JOB, *model(f"%/{name}")], said) for name, said in OF_CONFIG]
CASES += [([*command, *argv], said) for argv, said in OF_REWARDS for command in (RUN, ["validate", JOB])]
CASES += OF_OTHERS
SLOW = ("driver.run", "planning.memory", "doctor.report", "report.build", "trainer.export")
"""Modules that import torch, transformers, Ray or matplotlib."""


@pytest.fixture(autouse=True)
def nothing_slow(monkeypatch: pytest.MonkeyPatch, place: Path) -> Iterator[None]:
    monkeypatch.chdir(place / "nothing")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "prefix", str(place))
    for name in SLOW:
        monkeypatch.setitem(sys.modules, f"rljob_worker.{name}", None)
    before = {path.name for path in place.iterdir()}
    yield
    assert {path.name for path in place.iterdir()} == before, "left behind"


def test_there_are_many() -> None:
    assert len({tuple(argv) for argv, _ in CASES}) == len(CASES) > 120


@pytest.mark.parametrize(
    ("argv", "said"), CASES, ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else ""
)
def test_it_is_named_at_once(argv: list[str], said: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with at_once():
        try:
            code = main([argument.replace("%", str(place)) for argument in argv])
        except SystemExit as usage:
            code = usage.code
    assert code in (1, 2)
    text = capsys.readouterr().err
    assert said.replace("%", str(place)) in text
    assert "Traceback" not in text
    assert len(text) < 2500 + len(" ".join(argv))
