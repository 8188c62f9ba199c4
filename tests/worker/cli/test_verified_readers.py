"""Commands that read a run's checkpoints verify them as a resumed run does, and fall back or refuse alike."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import commit, lone_store
from record_cases import MANIFEST, run_folder
from test_replay import written

from rljob_api import RLJob
from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.checkpoints.run_folder import RunFolder
from rljob_worker.checkpoints.state import DriverState, UnverifiedError
from rljob_worker.cli.main import main
from rljob_worker.cli.trust import trusting
from rljob_worker.driver.replay import plan_replay
from rljob_worker.driver.run import _check_same_data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2, 4 and 6."""
    folder = run_folder(tmp_path / "run")
    store = lone_store(folder / "checkpoints", keep=3)
    for step in (2, 4, 6):
        commit(store, DriverState(step, step, {"at": step}, 1, 1))
    return folder


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the folders that are exported."""
    names: list[str] = []
    monkeypatch.setattr(
        "rljob_worker.trainer.export.export_checkpoint", lambda checkpoint, *_: names.append(checkpoint.name)
    )
    monkeypatch.setattr("rljob_worker.trainer.export.format_of", lambda *_: SimpleNamespace(untrained=(), lora=None))
    return names


def spoil(folder: Path, step: int, name: str = "driver.json") -> Path:
    path = folder / "checkpoints" / f"step-{step}" / name
    path.write_bytes(path.read_bytes().replace(b'"at": ', b'"ab": ').replace(b"state", b"State"))
    return path


def forget(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / "checkpoints" / f"step-{step}" / "driver.json.xxh3").unlink()


@pytest.mark.parametrize("name", ["driver.json", "rank-0"])
def test_export_falls_back_and_refuses_what_is_asked_for_by_name(
    folder: Path, exported: list[str], name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    target = ["--to", str(folder.parent / "to")]
    spoiled = spoil(folder, 6, name)
    assert main(["export", str(folder), *target]) == 0
    assert exported == ["step-4"]
    assert f"{spoiled.parent} is not used: " in caplog.text
    assert f"{spoiled}: its content is not what was written" in caplog.text
    assert "step 4 exported" in capsys.readouterr().out
    assert main(["export", str(folder), "--step", "6", *target]) == 1
    assert f"{spoiled}: its content is not what was written" in capsys.readouterr().err
    assert exported == ["step-4"]
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == ["step-2", "step-4", "step-6"]


def test_export_trusts_when_it_is_told_to(
    folder: Path, exported: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    command = ["export", str(folder), "--to", str(folder.parent / "to")]
    forget(folder, 6)
    assert main(command) == 0
    assert main([*command, "--trust-unverified"]) == 0
    assert exported == ["step-4", "step-4"], "verified comes first"
    assert main([*command, "--step", "6"]) == 2
    assert "step-6: has no driver.json.xxh3" in capsys.readouterr().err
    assert main([*command, "--step", "6", "--trust-unverified"]) == 0
    assert exported[2:] == ["step-6"]
    forget(folder, 2, 4)
    assert main(command) == 2
    assert "--trust-unverified" in capsys.readouterr().err
    caplog.clear()
    assert main([*command, "--trust-unverified"]) == 0
    assert exported[3:] == ["step-6"]
    assert "step-6 is used as it is" in caplog.text
    content = json.loads((folder / "run.json").read_text())
    content["job"]["spec"]["checkpoint"]["trustUnverified"] = True
    (folder / "run.json").write_text(json.dumps(content))
    assert main(command) == 0, "the job says so"


def test_a_replay_begins_with_one_that_is_whole(folder: Path) -> None:
    written(folder, {number: (number - 1,) for number in range(1, 9)})
    spoil(folder, 6, "rank-0")
    plan = plan_replay(folder, Checkpoints(folder / "checkpoints"), 8)
    assert (plan.start, [one.number for one in plan.trained]) == (4, [5, 6, 7])
    assert plan.begins_with is not None
    assert "step-6/rank-0" in plan.begins_with.passed_over[0].reason
    forget(folder, 2, 4, 6)
    with pytest.raises(UnverifiedError, match="--trust-unverified"):
        plan_replay(folder, Checkpoints(folder / "checkpoints"), 8)
    assert plan_replay(folder, Checkpoints(folder / "checkpoints", trust_unverified=True), 8).start == 4


def test_an_audit_reads_them_when_it_is_told_to(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"step": 1, "attempt": 1, "step_seconds": 1.0, "time": 0.0, "phases": {}, "other": 1.0, "metrics": {}}
    prompts = {"next": 1, "trained": [[0, 1]], "filtered": [], "open": []}
    line = record | {"weights": {}, "memory": {}, "index": 0, "rerun": False, "prompts": prompts}
    (folder / "steps.jsonl").write_text(json.dumps(line) + "\n")
    forget(folder, 2, 4, 6)
    assert main(["audit", str(folder)]) == 1
    assert capsys.readouterr().out.count("has no driver.json.xxh3") == 3
    main(["audit", str(folder), "--trust-unverified"])
    assert "driver.json.xxh3" not in capsys.readouterr().out


def test_a_resume_says_so_before_anything_is_started(folder: Path) -> None:
    job = RLJob.model_validate(MANIFEST)
    checked: list[object] = []
    rows = {"compare_rows": lambda store: None, "remember_rows": lambda store: None}
    inputs = SimpleNamespace(prompts=SimpleNamespace(check=checked.append, **rows))
    forget(folder, 2, 4, 6)
    for one in (job, trusting(job)):
        run = RunFolder(folder, one, resume=True)
        if one is job:
            with pytest.raises(UnverifiedError, match=r"step-6: has no driver\.json\.xxh3"):
                _check_same_data(run, inputs)  # type: ignore[arg-type]
        else:
            _check_same_data(run, inputs)  # type: ignore[arg-type]
        run.close()
    assert checked == [{"at": 6}]


def test_a_new_run_has_nothing_to_trust(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(MANIFEST))
    assert main(["run", str(job), "--output", str(tmp_path / "run"), "--trust-unverified"]) == 2
    assert "--trust-unverified: needs --resume" in capsys.readouterr().err
