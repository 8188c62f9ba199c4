"""Refusals of `rljob eval` before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from record_cases import MANIFEST, run_folder

from rljob_worker.cli.main import main

EVALUATION = {"data": {"name": "held", "synthetic": {"rows": 4}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run without a checkpoint, one of its checkpoint folders that is elsewhere, and a model folder."""
    run_folder(tmp_path / "run")
    (tmp_path / "elsewhere" / "step-7").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], folder: Path, *options: str, **spec: Any) -> str:
    job = folder / "job.yaml"
    job.write_text(yaml.safe_dump(MANIFEST | {"spec": MANIFEST["spec"] | spec}))
    given = [option.replace("DIR", str(folder)) for option in options]
    assert main(["eval", str(job), "--output", str(folder / "out"), *given]) == 2
    assert not (folder / "out").exists()
    return capsys.readouterr().err


def test_a_job_without_held_out_data(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert "spec.evaluation: the job has no held-out data" in said(capsys, folder, evaluation=None)


def test_more_than_this_machine(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    resources = MANIFEST["spec"]["resources"] | {"nodes": 2}
    wrong = said(capsys, folder, evaluation=EVALUATION, resources=resources)
    assert "eval runs on this machine alone" in wrong
    assert "spec.resources.nodes" in wrong


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--step", "3"], "--step: needs --checkpoint"),
        (["--trust-unverified"], "--trust-unverified: needs --checkpoint"),
        (["--checkpoint", "DIR/none"], "--checkpoint: DIR/none: there is no such folder"),
        (["--checkpoint", "DIR/model"], "--checkpoint: DIR/model is a model folder, not one of a run; spec.model.path"),
        (["--checkpoint", "DIR/empty"], "--checkpoint: DIR/empty is no run folder and no checkpoint of one (step-N)"),
        (["--checkpoint", "DIR/elsewhere/step-7"], "name the run folder and --step 7"),
        (["--checkpoint", "DIR/run"], "no complete checkpoint yet; `rljob save DIR/run`"),
        (["--checkpoint", "DIR/run", "--step", "3"], "no complete checkpoint of step 3"),
        (["--model", "DIR/none"], "--model: DIR/none: there is no such folder"),
        (["--model", "DIR/run"], "holds no exported weights; use --checkpoint DIR/run"),
        (["--model", "DIR/empty"], "DIR/empty"),
    ],
)
def test_weights_that_are_not_there(
    capsys: pytest.CaptureFixture[str], folder: Path, options: list[str], wrong: str
) -> None:
    assert wrong.replace("DIR", str(folder)) in said(capsys, folder, *options, evaluation=EVALUATION)


def test_another_step_than_the_folders(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "run" / "checkpoints" / "step-7").mkdir(parents=True)
    options = ["--checkpoint", "DIR/run/checkpoints/step-7", "--step", "3"]
    assert "--step: 3, and --checkpoint is the one of step 7" in said(capsys, folder, *options, evaluation=EVALUATION)
