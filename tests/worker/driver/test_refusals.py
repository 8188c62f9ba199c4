"""Bad input is refused before any process starts, and the message names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import manifest

from rljob_api.wire.exit_codes import ExitCode
from rljob_worker.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The error message of `rljob ARGUMENTS`, which must be a user error."""
    assert main([str(argument) for argument in arguments]) == ExitCode.USER_ERROR
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


def _data(folder: Path, *lines: str) -> dict[str, Any]:
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return {"path": str(folder / "data.jsonl")}


GOOD = json.dumps({"prompt": "a b", "label": "b"})


def test_missing_data_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = manifest(tmp_path, data={"path": str(tmp_path / "absent.jsonl")})
    assert "absent.jsonl" in refused(capsys, "run", job, "--output", tmp_path / "run")


def test_empty_data_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").touch()
    job = manifest(tmp_path, data={"path": str(tmp_path / "empty.jsonl")})
    assert "empty.jsonl" in refused(capsys, "run", job, "--output", tmp_path / "run")


def test_broken_json_line_names_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = manifest(tmp_path, data=_data(tmp_path, GOOD, '{"prompt": '))
    assert "data.jsonl, line 2: not valid JSON" in refused(capsys, "run", job, "--output", tmp_path / "run")


def test_absent_label_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = manifest(tmp_path, data={**_data(tmp_path, GOOD), "labelKey": "answer"})
    message = refused(capsys, "run", job, "--output", tmp_path / "run")
    assert "answer" in message
    assert "label" in message


def test_model_folder_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    job = manifest(tmp_path, model={"path": str(folder)}, data=_data(tmp_path, GOOD))
    assert str(folder) in refused(capsys, "run", job, "--output", tmp_path / "run")


def test_reward_path_that_does_not_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = manifest(tmp_path, reward={"python": "no_such_module_anywhere:score"})
    assert "no_such_module_anywhere" in refused(capsys, "run", job, "--output", tmp_path / "run")


def test_heads_not_divisible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = manifest(tmp_path, training={"tensorParallel": 4, "precision": "fp32"})
    message = refused(capsys, "run", job, "--output", tmp_path / "run")
    assert "num_key_value_heads" in message
    assert "tensorParallel" in message


def test_head_size_that_the_engine_has_no_kernel_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = manifest(tmp_path)
    message = refused(capsys, "run", job, "--output", tmp_path / "run", "--set", "spec.model.random.config.head_dim=16")
    assert "head_dim of 16" in message
    assert "32, 64" in message


def test_responses_that_leave_no_room_for_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollout = {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 64}
    job = manifest(tmp_path, rollout=rollout)
    assert "spec.rollout.maxResponseTokens" in refused(capsys, "run", job, "--output", tmp_path / "run")


def test_a_device_without_its_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = manifest(tmp_path, resources={"profile": "ascend-a2", "devicesPerNode": 1})
    message = refused(capsys, "run", job, "--output", tmp_path / "run")
    assert "rljob: spec.resources.profile: 'ascend-a2' cannot be used here: torch_npu is not installed" in message
    assert not (tmp_path / "run").exists()


def test_refused_run_leaves_the_folder_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = manifest(tmp_path, data={"path": str(tmp_path / "absent.jsonl")})
    refused(capsys, "run", bad, "--output", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("precious")
    message = refused(capsys, "run", manifest(tmp_path), "--output", tmp_path / "run")
    assert "thesis.txt" in message
    assert (tmp_path / "run" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("spec.mode=Asynchronous", "Disaggregated"),
        ("spec.training.backend=DeepSpeed", "one of Megatron, FSDP"),
        ("spec.algorithm.name=dpo", "gspo"),
        ("spec.resources.profile=ascend-a2", "spec.resources.profile"),
        ("spec.rollout.temperatur=1", "temperature"),
        ("spec.steps=many", "spec.steps"),
        ("spec.training.globalBatchSize=5", "globalBatchSize"),
    ],
)
def test_manifest_problems(override: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "run", manifest(tmp_path), "--output", tmp_path / "run", "--set", override)
    assert expected in message
    assert not (tmp_path / "run").exists()
