"""Faults that trainers and engines would find minutes later are refused before anything is started."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import yaml
from jobs import REPOSITORY
from safetensors.torch import load_file, save_file

from rljob_api import RLJob, RLJobSpec
from rljob_api.spec import RandomModel
from rljob_api.wire.exit_codes import ExitCode
from rljob_worker.checkpoints.run_folder import RunFolder
from rljob_worker.cli.main import main
from rljob_worker.data.tokenizer import prepare_tokenizer
from rljob_worker.driver import attempt, preflight, run
from rljob_worker.driver.inputs import read_inputs
from rljob_worker.errors import AwayError, JobError, UserError
from rljob_worker.models.random_model import make_random_model

CONFIG = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip


def spec_of(**blocks: Any) -> RLJobSpec:
    spec = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())["spec"]
    spec["rollout"] |= {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 4}
    spec["data"]["synthetic"]["rows"] = 64
    return RLJobSpec.model_validate(spec | {"model": {"random": {"config": CONFIG}}} | blocks)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a model folder."""
    folder = tmp_path_factory.mktemp("model")
    spec = spec_of()
    prepare_tokenizer(spec, folder)
    make_random_model(RandomModel(config=CONFIG), folder, folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def model(made: dict[str, bytes], tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in made.items():
        (folder / name).write_bytes(content)
    return folder


def refused(tmp_path: Path, kind: type[Exception] = UserError, **blocks: Any) -> str:
    with pytest.raises(kind) as error:
        read_inputs(spec_of(**blocks), tmp_path / "run")
    return str(error.value)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _change(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tensors = load_file(path)
        changed = change(tensors.pop(name))
        save_file(tensors | ({} if changed is None else {name: changed}), path)

    return apply


def _with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor[-1, -1] = float("nan")
    return tensor


Q = "model.layers.1.self_attn.q_proj.weight"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (_cut, "not a readable safetensors file"),
    "empty": (lambda path: path.write_bytes(b""), "not a readable safetensors file"),
    "no header": (lambda path: path.write_bytes(b"\xff" * 100), "not a readable safetensors file"),
    "tensor missing": (_change(Q, lambda tensor: None), f"tensor {Q} is missing"),
    "wrong shape": (_change(Q, lambda tensor: tensor[:-1].contiguous()), f"tensor {Q} has shape (127, 64)"),
    "wrong type": (_change(Q, lambda tensor: tensor.to(torch.int8)), f"tensor {Q} is of type I8"),
    "not finite": (_change(Q, _with_nan), f"tensor {Q} holds numbers that are not finite"),
    "gone": (lambda path: path.unlink(), "no weights"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights(damage: str, model: Path, tmp_path: Path) -> None:
    break_it, message = DAMAGE[damage]
    break_it(model / "model.safetensors")
    assert message in refused(tmp_path, model={"path": str(model)})


INDEXES: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "not a safetensors index"),
    "a list": ([], "not a safetensors index"),
    "no files": ({"weight_map": {Q: 5}}, "must map tensors to names of files"),
    "a name that no file has": ({"weight_map": {Q: "a" * 300 + ".safetensors"}}, "must map tensors to names of files"),
    "elsewhere": ({"weight_map": {Q: "../model.safetensors"}}, "must map tensors to names of files"),
    "a file that is not there": ({"weight_map": {Q: "b.safetensors"}}, "b.safetensors: no such file"),
    "a tensor that is not there": ({"weight_map": {"x": "model.safetensors"}}, "tensor x is missing"),
}


@pytest.mark.parametrize("index", INDEXES)
def test_damaged_index(index: str, model: Path, tmp_path: Path) -> None:
    content, message = INDEXES[index]
    text = content if isinstance(content, str) else json.dumps(content)
    (model / "model.safetensors.index.json").write_text(text)
    assert message in refused(tmp_path, model={"path": str(model)})


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[" * 5000, "not valid JSON"),
        ("config.json", "\udcff", "not valid JSON"),
        ("config.json", json.dumps(CONFIG | {"vocab_size": 5}), "tokens, the model's embedding 5 "),
        ("tokenizer.json", "{", "tokenizer.json: not valid JSON: the file is cut off"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: must hold a JSON object, got list"),
        ("tokenizer.json", None, "tokenizer"),
    ],
)
def test_damaged_config_and_tokenizer(
    file: str, content: str | None, message: str, model: Path, tmp_path: Path
) -> None:
    if content is None:
        (model / file).unlink()
    else:
        (model / file).write_text(content, errors="surrogateescape")
    found = refused(tmp_path, model={"path": str(model)})
    assert message in found or "shape" in found, found


def test_engine_arguments_are_vllms(tmp_path: Path) -> None:
    rollout = {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 4, "engineArgs": {"max_model_lenn": 5}}
    found = refused(tmp_path, rollout=rollout)
    assert found == (
        "spec.rollout.engineArgs.max_model_lenn: vLLM has no such engine argument, did you mean max_model_len?"
    )


def test_reward_that_asks_for_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asking.py").write_text("def score(response, answer):\n    return 0.0\n")
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b", "level": 1}) + "\n")
    monkeypatch.chdir(tmp_path)
    data = {"path": str(tmp_path / "data.jsonl"), "labelKey": "answer"}
    found = refused(tmp_path, data=data, reward={"python": "asking:score"})
    assert "spec.reward.python: 'asking:score' asks for 'answer'" in found
    assert "label, level, prompt, response (the column of labelKey comes as label)" in found


@pytest.mark.parametrize("place", ["file", "below a file", "read-only"])
def test_checkpoint_folder_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = {"file": tmp_path / "file", "below a file": tmp_path / "file" / "x", "read-only": Path("/proc/self/x")}[
        place
    ]
    found = refused(tmp_path, checkpoint={"path": str(path)})
    assert found.startswith(f"spec.checkpoint.path: {path}: cannot be written")


def test_room_for_two_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    found = refused(tmp_path, JobError, checkpoint={"path": str(tmp_path / "new")})
    assert "0.0 GiB are free; 2 checkpoints of this model need" in found
    assert not (tmp_path / "new").exists()


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JobError, match=f"spec.records.httpPort: {port}: cannot listen on 127.0.0.1"):
            preflight.check_port("127.0.0.1", port)
    preflight.check_port("127.0.0.1", port)
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1"):
        preflight.check_port("192.0.2.1", 0)
    with pytest.raises(UserError, match=r"spec\.records\.httpHost: no-such-host\.invalid is no address"):
        preflight.check_port("no-such-host.invalid", 0)


def test_validate_reads_the_config_of_a_local_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 33}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | experts | {"model_type": "qwen3_moe"}))
    document = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())
    document["spec"] |= {"model": {"path": str(tmp_path)}}
    document["spec"]["training"]["tensorParallel"] = 2
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    assert main(["validate", str(tmp_path / "job.yaml")]) == 2
    message = capsys.readouterr().err
    assert "spec.training.tensorParallel: does not divide the model's moe_intermediate_size (33)" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"intermediate_size": 100},
            "model.safetensors: tensor model.layers.0.mlp.down_proj.weight has shape (64, 128)",
        ),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "take qwen3 as Qwen3ForCausalLM; allowed: Qwen3ForC"),
        ({"architectures": "Qwen3ForCausalLM"}, 'architectures: "Qwen3ForCausalLM": is no list of names'),
    ],
)
def test_validate_holds_a_local_model_against_its_config(
    settings: dict[str, Any], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | settings))
    document = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())
    document["spec"] |= {"model": {"path": str(model)}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    assert main(["validate", str(tmp_path / "job.yaml")]) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_is_away_ends_a_run_for_good_only_before_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> NoReturn:
        raise AwayError("judge: no answer")

    def start(resume: bool) -> None:
        run.run_job(job, folder, resume=resume, on_record=print, on_event=print)

    monkeypatch.setattr(run, "read_inputs", away)
    about = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "away"}}
    folder, job = tmp_path / "run", RLJob.model_validate({**about, "spec": spec_of()})
    with pytest.raises(AwayError, match="judge: no answer") as first:
        start(False)
    assert first.value.exit_code == ExitCode.USER_ERROR
    assert not folder.exists()
    RunFolder(folder, job, resume=False).close()
    with pytest.raises(JobError, match="judge: no answer") as later:
        start(True)
    assert later.value.exit_code == ExitCode.FAILED
    assert (folder / "run.json").exists()


@pytest.mark.parametrize("where", ["data", "evaluation"])
def test_a_label_that_cannot_be_read_ends_nothing_that_was_started(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(attempt, "embedded", lambda spec: pytest.fail("Ray was started"))
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"prompt": "a b", "label": "7"}\n' * 8)
    bad.write_text('{"prompt": "a b", "label": "7"}\n' * 3 + '{"prompt": "a b", "label": "{7"}\n')
    blocks = {"data": {"path": str(good)}} | ({} if where == "data" else {"evaluation": {"data": {"path": str(bad)}}})
    spec = spec_of(reward={"name": "math"}, **(blocks | ({"data": {"path": str(bad)}} if where == "data" else {})))
    manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "labels"}, "spec": spec}
    job = RLJob.model_validate(manifest)
    with pytest.raises(UserError, match=rf"{bad}, row 3: the braces of the label do not match"):
        run.run_job(job, tmp_path / "run", resume=False, on_record=print, on_event=print)
    assert not (tmp_path / "run").exists()
