"""RLJob from Python: tables of a run's folder, problems of a manifest, and a job in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from record_cases import MANIFEST, bare, run_folder, write_run, write_sample_tokens, write_samples
from support.samples import unless_all

import rljob
from rljob.jobs import _sent
from rljob_api.yaml_text import parse_yaml
from rljob_worker.records.steps import StepLog, read_steps

REPOSITORY = Path(__file__).parents[3]


def test_steps_and_metrics_are_those_of_the_records(tmp_path: Path) -> None:
    records = write_run(tmp_path, 30)
    run = rljob.load(tmp_path)
    assert run.name == "sample-run"
    steps, metrics = run.steps(), run.metrics()
    assert steps["step"] == metrics["step"] == list(range(1, 31))
    assert steps["phase/rollout"] == [record.phases["rollout"] for record in records]
    assert steps["phase/eval"][0] is None, "every 25th step has one"
    for row, record in zip(steps, records, strict=True):
        phases = sum(value for name, value in row.items() if name.startswith("phase/") and value is not None)
        assert phases == pytest.approx(record.step_seconds)
    assert metrics["rollout/raw_reward"] == [record.reward for record in records]
    assert [at for at, value in zip(metrics["step"], metrics["eval/synthetic"]) if value is not None] == [25]
    assert metrics.to_pandas().shape == (30, len(metrics.columns))


def test_a_step_that_a_restart_made_obsolete_is_not_there_and_lanes_have_columns(tmp_path: Path) -> None:
    run_folder(tmp_path)
    log = StepLog(tmp_path)
    for record in (
        bare(0, metrics={"eval/synthetic": 0.5}), bare(1), bare(2),
        bare(2, 2, lanes={"engine": {"rollout": 0.4}}, phases={"actor_train": 0.6}, other=0.4),
    ):  # fmt: skip
        log.append(record)
    log.close()
    assert len(read_steps(tmp_path)) == 4
    run = rljob.load(tmp_path)
    assert [(row["step"], row["attempt"]) for row in run.steps()] == [(1, 1), (2, 2)]
    assert run.steps()["phase/engine/rollout"] == [None, 0.4]
    assert run.metrics()["eval/synthetic"] == [0.5, None, None]


def test_tokens_stand_beside_the_samples_that_have_them(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    write_samples(tmp_path, 2, ["a b", "c"], [0.0, 1.0])
    assert "tokens" not in rljob.load(tmp_path).trajectories()
    write_sample_tokens(tmp_path, 2, 0, "a b", ["a", " b"])
    table = rljob.load(tmp_path).trajectories()
    assert table["tokens"] == [["a", " b"], None]
    assert table["engine_log_probs"] == [[-1.0, -2.0], None]
    assert table["trainer_log_probs"] == [[-1.0, -2.25], None]
    write_sample_tokens(tmp_path, 2, 0, "a b", ["a", " b"], trained=False)
    assert rljob.load(tmp_path).trajectories()["trainer_log_probs"] == [None, None]


def test_samples_by_step_and_the_summary(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    run = rljob.load(tmp_path)
    assert run.summary() is None
    with pytest.raises(rljob.UserError, match="no trajectories yet"):
        run.trajectories()
    write_samples(tmp_path, 2, ["old"], [0.0])
    write_samples(tmp_path, 3, ["<b>one</b>", "two"], [0.1, 0.9])
    assert run.trajectory_steps() == [2, 3]
    samples = run.trajectories()
    assert (samples["step"], samples["response"], samples["reward"]) == ([3, 3], ["<b>one</b>", "two"], [0.1, 0.9])
    assert run.trajectories(2)["response"] == ["old"]
    shown = samples._repr_html_()
    assert "&lt;b&gt;one&lt;/b&gt;" in shown
    assert "<b>" not in shown
    with pytest.raises(KeyError, match="no column 'rewards'; there are step, ordinal, prompt_uid"):
        samples["rewards"]
    (tmp_path / "summary.json").write_text(json.dumps({"outcome": "Succeeded"}))
    assert run.summary() == {"outcome": "Succeeded"}
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(rljob.UserError, match=r"summary\.json: damaged"):
        run.summary()


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(rljob.UserError, match="there is no such folder"):
        rljob.load(tmp_path / "missing")
    with pytest.raises(rljob.UserError, match="not a run folder"):
        rljob.load(tmp_path)


def test_problems_of_a_manifest_are_listed_with_their_paths(tmp_path: Path) -> None:
    assert rljob.validate(MANIFEST) == []
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(MANIFEST))
    for given in (tmp_path / "job.yaml", str(tmp_path / "job.yaml"), yaml.safe_dump(MANIFEST)):
        assert rljob.validate(given) == []
        found = rljob.validate(given, set=["spec.steps=-1", "spec.rollout.topP=2"])
        assert sorted(problem.path for problem in found) == ["spec.rollout.topP", "spec.steps"]
    assert [problem.wrong for problem in rljob.validate("kind: [")] != []


def test_a_job_that_does_not_start_is_an_error_with_what_was_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(rljob.JobError, match=r"spec\.steps") as raised:
        rljob.run(MANIFEST, tmp_path / "run", set=["spec.steps=-1"], quiet=True)
    assert raised.value.exit_code == 2
    assert capfd.readouterr().out == ""
    with pytest.raises(rljob.JobError, match="missing"):
        rljob.run(tmp_path / "missing.yaml", tmp_path / "run")
    assert "missing" in capfd.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (np.int64(5), "spec.steps: is of Python's type int64, which is no JSON; allowed: a text, a number"),
        (Path("a"), "spec.steps: is of Python's type PosixPath, which is no JSON"),
        ({1, 2}, "spec.steps: is of Python's type set, which is no JSON"),
        ("\ud800", "spec.steps: holds half a character"),
        (float("nan"), "spec.steps: NaN"),
    ],
)
def test_values_that_no_manifest_has_are_named_by_both(tmp_path: Path, value: object, wrong: str) -> None:
    document = {**MANIFEST, "spec": {**MANIFEST["spec"], "steps": value}}
    (problem,) = rljob.validate(document)
    assert str(problem).startswith(wrong)
    with pytest.raises(rljob.JobError) as raised:
        rljob.run(document, tmp_path / "run", quiet=True)
    assert raised.value.exit_code == 2
    assert wrong in str(raised.value)


def test_a_document_inside_itself_is_refused() -> None:
    document: dict[str, Any] = {**MANIFEST}
    document["spec"] = document
    (problem,) = rljob.validate(document)
    assert "blocks inside each other" in str(problem)


@pytest.mark.parametrize(
    "text",
    ["1e3", "yes", "null", "~", "#x", "&a", "a: b", "a\nb", "\x00\x7f\x85\x9f", "\u2028\ufeff", "\U0001f600", '"\\'],
)
def test_a_text_of_a_document_stays_what_it_is(text: str) -> None:
    assert parse_yaml(_sent({text: [text, 1e3, True, None]})) == {text: [text, 1e3, True, None]}


def test_importing_it_takes_none_of_the_heavy_packages() -> None:
    heavy = ("torch", "vllm", "ray", "transformers", "pandas")
    code = f"import rljob, sys; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
@unless_all("the notebook trains for a minute")
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = json.loads((REPOSITORY / "examples" / "notebook.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in code), "it holds no results"
    cells = ["".join(cell["source"]) for cell in code]
    (tmp_path / "cells.py").write_text("\n\n".join(cells))
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, env=os.environ | {"MPLBACKEND": "Agg"}, capture_output=True,
        text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(rljob.load(tmp_path / "runs" / "notebook").steps()) == 30
