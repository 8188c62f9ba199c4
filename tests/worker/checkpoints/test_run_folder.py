from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from jobs import commit, lone_store

from rljob_api import RLJob
from rljob_api.wire.exit_codes import ExitCode
from rljob_worker.checkpoints.run_folder import RunFolder
from rljob_worker.checkpoints.state import DriverState
from rljob_worker.driver.outcome import failed
from rljob_worker.errors import JobError, UserError
from rljob_worker.host.files import write_whole
from rljob_worker.records.run_files import require_run_folder

SPEC: dict[str, Any] = {
    "steps": 10,
    "model": {"path": "/models/small"},
    "data": {"path": "/data/train.jsonl"},
    "reward": {"name": "match"},
    "rollout": {"promptsPerStep": 2, "samplesPerPrompt": 2, "maxResponseTokens": 9},
    "resources": {"profile": "cpu", "nodes": 1},
}


def job(name: str = "one", uid: str | None = None, **spec: Any) -> RLJob:
    document = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": name, "uid": uid}}
    spec["rollout"] = {**SPEC["rollout"], **spec.get("rollout", {})}
    return RLJob.model_validate({**document, "spec": {**SPEC, **spec}})


def used(path: Path, made_for: RLJob) -> None:
    RunFolder(path, made_for, resume=False).close()


def test_attempts_are_counted(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        folder = RunFolder(tmp_path / "run", job(), resume=attempt > 1)
        assert folder.attempt == attempt
        folder.close()
    assert require_run_folder(tmp_path / "run").attempt == 3


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_folder_that_is_made_is_its_owners_alone_and_others_keep_their_modes(tmp_path: Path) -> None:
    """run.json holds the variables of the manifest."""
    before = os.umask(0o002)
    try:
        folder = RunFolder(tmp_path / "runs" / "made", job(), resume=False)
        assert (mode(folder.path), mode(folder.path.parent)) == (0o700, 0o775)
        assert mode(folder.path / "run.json") == 0o600
        assert folder.open_to_others() == []
        folder.close()
        (tmp_path / "there").mkdir()
        (tmp_path / "there").chmod(0o755)
        kept = tmp_path / "checkpoints"
        folder = RunFolder(tmp_path / "there", job(checkpoint={"path": str(kept)}), resume=False)
        assert (mode(folder.path), mode(kept), mode(folder.path / "run.json")) == (0o755, 0o775, 0o600)
        assert folder.open_to_others() == [tmp_path / "there", kept]
        folder.close()
    finally:
        os.umask(before)


def test_a_temporary_file_of_a_crash_does_not_open_a_private_one(tmp_path: Path) -> None:
    (tmp_path / "secret.tmp").touch(mode=0o666)
    write_whole(tmp_path / "secret", "x", private=True)
    assert mode(tmp_path / "secret") == 0o600


def test_a_run_must_be_resumed_on_purpose(tmp_path: Path) -> None:
    used(tmp_path, job())
    with pytest.raises(UserError, match="holds a run of one; add --resume"):
        RunFolder(tmp_path, job(), resume=False)


def test_another_job_is_refused_with_what_differs(tmp_path: Path) -> None:
    used(tmp_path, job())
    other = job("two", seed=7, training={"optimizer": {"lr": 0.5}}, rollout={"topP": 0.9})
    with pytest.raises(UserError, match="belongs to another job") as caught:
        RunFolder(tmp_path, other, resume=True)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert [line.split(":")[0] for line in lines] == [
        "metadata.name",
        "spec.rollout.topP",
        "spec.seed",
        "spec.training.optimizer.lr",
    ]
    assert lines[0] == "metadata.name: one there, two here"
    assert lines[1] == "spec.rollout.topP: 1.0 there, 0.9 here"
    RunFolder(tmp_path, job(), resume=True).close()


def test_a_run_of_a_version_that_knew_fewer_fields_is_the_same_job(tmp_path: Path) -> None:
    used(tmp_path, job())
    file = tmp_path / "run.json"
    old = json.loads(file.read_text())
    reward = {name: value for name, value in old["job"]["spec"]["reward"].items() if name in ("name", "args")}
    old["job"]["spec"]["reward"] = reward
    # Nor had it a checksum.
    del old["crc32"]
    file.write_text(json.dumps(old))
    RunFolder(tmp_path, job(), resume=True).close()
    with pytest.raises(UserError, match=r"spec\.reward\.network: true there, false here"):
        RunFolder(tmp_path, job(reward={"name": "match", "network": False}), resume=True)


def test_what_does_not_make_another_job_may_change(tmp_path: Path) -> None:
    used(tmp_path, job())
    changed = job(steps=20, checkpoint={"everySteps": 5}, timeouts={"phaseSeconds": 9}, records={"tensorboard": False})
    folder = RunFolder(tmp_path, changed, resume=True)
    assert folder.attempt == 2
    folder.close()
    assert require_run_folder(tmp_path).spec["steps"] == 20


def test_another_layout_does_not_make_another_job(tmp_path: Path) -> None:
    used(tmp_path, job())
    layout = {"tensorParallel": 2, "pipelineParallel": 2}
    devices = {"profile": "cpu", "devicesPerNode": 4}
    RunFolder(tmp_path, job(training=layout, resources=devices, rollout={"tensorParallel": 4}), resume=True).close()
    assert require_run_folder(tmp_path).spec["training"]["tensorParallel"] == 2
    rows = {"backend": "FSDP", "fsdp": {"shardSize": 2}}
    RunFolder(tmp_path, job(training=rows, resources=devices), resume=True).close()
    with pytest.raises(UserError, match="belongs to another job") as caught:
        RunFolder(tmp_path, job(training={"precision": "fp32"}, resources=devices), resume=True)
    assert str(caught.value).count("spec.") == 1
    assert 'spec.training.precision: "bf16" there, "fp32" here' in str(caught.value)


def test_auto_begins_and_then_continues(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        folder = RunFolder(tmp_path / "run", job(), resume="auto")
        assert folder.attempt == attempt
        folder.close()
    with pytest.raises(UserError, match="belongs to another job"):
        RunFolder(tmp_path / "run", job("two"), resume="auto")


def test_the_uid_is_part_of_a_jobs_identity_where_it_is_known(tmp_path: Path) -> None:
    used(tmp_path, job(uid="a"))
    for resume in (True, "auto"):
        with pytest.raises(UserError, match=r"metadata\.uid: a there, b here") as caught:
            RunFolder(tmp_path, job(uid="b"), resume)  # type: ignore[arg-type]
        assert len(str(caught.value).splitlines()) == 2
    for again in (job(), job(uid="a")):
        RunFolder(tmp_path, again, resume=True).close()
        assert require_run_folder(tmp_path).uid == "a", "kept, also by a run without it"


def test_auto_does_not_go_on_from_the_checkpoints_of_another_run(tmp_path: Path) -> None:
    store = lone_store(tmp_path / "checkpoints", keep=1)
    commit(store, DriverState(40, 40, {}, 1, 1))
    elsewhere = job(checkpoint={"path": str(tmp_path / "checkpoints")})
    with pytest.raises(UserError, match="holds a checkpoint of step 40"):
        RunFolder(tmp_path / "run", elsewhere, resume="auto")


def test_auto_waits_for_the_driver_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RunFolder(tmp_path, job(), resume=False)
    threading.Timer(0.3, first.close).start()
    RunFolder(tmp_path, job(), resume="auto").close()

    monkeypatch.setattr("rljob_worker.checkpoints.run_folder._LOCK_SECONDS", 0.2)
    held = RunFolder(tmp_path, job(), resume=True)
    with pytest.raises(JobError, match=r"still running in this folder after 0\.2 s"):
        RunFolder(tmp_path, job(), resume="auto")
    held.close()


def test_a_folder_is_used_by_one_driver_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, job(), resume=False)
    with pytest.raises(UserError, match="another rljob driver is running in this folder"):
        RunFolder(tmp_path, job(), resume=True)
    folder.close()
    RunFolder(tmp_path, job(), resume=True).close()


def test_a_killed_drivers_folder_is_free(tmp_path: Path) -> None:
    code = (
        "import fcntl, os, signal, sys\n"
        "fcntl.flock(open(sys.argv[1], 'w'), fcntl.LOCK_EX); os.kill(os.getpid(), signal.SIGKILL)"
    )
    used(tmp_path, job())
    subprocess.run([sys.executable, "-c", code, str(tmp_path / ".lock")], timeout=60)
    RunFolder(tmp_path, job(), resume=True).close()


def test_strangers_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    for resume in (False, True):
        with pytest.raises(UserError, match=r"it holds thesis\.tex"):
            RunFolder(tmp_path, job(), resume)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("left", [[".lock"], [".lock", "run.json.tmp"]])
def test_a_start_that_was_killed_does_not_spoil_the_folder(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        (tmp_path / name).write_text("{")
    folder = RunFolder(tmp_path, job(), resume=False)
    assert folder.attempt == 1
    folder.close()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"job": {}, "attempt": 1}', '{"job": 3, "attempt": 1}'])
def test_a_damaged_run_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json: not a run description"):
        RunFolder(tmp_path, job(), resume=True)


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="cannot be a run folder"):
            RunFolder(path, job(), resume=False)


def test_a_first_attempt_that_never_started_is_discarded(tmp_path: Path) -> None:
    new = RunFolder(tmp_path / "new", job(), resume=False)
    (new.path / "model").mkdir()
    (new.path / "model" / "config.json").write_text("{}")
    new.discard_if_new()
    new.close()
    assert not (tmp_path / "new").exists()

    (tmp_path / "mine").mkdir()
    mine = RunFolder(tmp_path / "mine", job(), resume=False)
    mine.discard_if_new()
    mine.close()
    assert list((tmp_path / "mine").iterdir()) == []

    used(tmp_path / "old", job())
    old = RunFolder(tmp_path / "old", job(), resume=True)
    old.discard_if_new()
    old.close()
    assert (tmp_path / "old" / "run.json").is_file()


@pytest.mark.parametrize("checkpoints", ["file", "file/x"])
def test_a_refused_driver_leaves_no_folder_behind(tmp_path: Path, checkpoints: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be spec\.checkpoint\.path"):
        RunFolder(tmp_path / "runs" / "new", job(checkpoint={"path": str(tmp_path / checkpoints)}), resume=False)
    with pytest.raises(UserError, match="cannot be a run folder"):
        RunFolder(tmp_path / "runs" / ("a" * 300), job(), resume=False)
    new = RunFolder(tmp_path / "runs" / "new", job(), resume=False)
    new.discard_if_new()
    new.close()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    used(tmp_path / "runs" / "mine", job())
    new = RunFolder(tmp_path / "runs" / "new", job(), resume=False)
    new.discard_if_new()
    new.close()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]


def test_a_new_run_does_not_go_on_from_old_checkpoints(tmp_path: Path) -> None:
    store = lone_store(tmp_path / "checkpoints", keep=1)
    commit(store, DriverState(40, 40, {}, 1, 1))
    elsewhere = job(checkpoint={"path": str(tmp_path / "checkpoints")})
    with pytest.raises(UserError, match=r"spec\.checkpoint\.path: .* holds a checkpoint of step 40; add --resume"):
        RunFolder(tmp_path / "run", elsewhere, resume=False)
    RunFolder(tmp_path / "run", elsewhere, resume=True).close()


def test_run_json_says_who_runs(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, job(), resume=False)
    content = json.loads((tmp_path / "run.json").read_text())
    assert (content["pid"], content["attempt"], content["job"]["metadata"]["name"]) == (os.getpid(), 1, "one")
    folder.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_what_the_environment_did_is_no_error_of_the_user(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", fail)
        with pytest.raises(JobError, match="cannot be a run folder") as caught:
            RunFolder(tmp_path / "new", job(), resume="auto")
    assert caught.value.exit_code == 1
    used(tmp_path / "old", job())
    with monkeypatch.context() as patch:
        patch.setattr("rljob_worker.records.run_files.read_file", fail)
        with pytest.raises(JobError, match=r"run\.json: cannot be read"):
            RunFolder(tmp_path / "old", job(), resume=True)
    # What nobody in between has turned into words of this project.
    assert failed(OSError(number, os.strerror(number), "/run/x")).exit_code == ExitCode.FAILED
    monkeypatch.setattr("rljob_worker.checkpoints.fencing.fcntl.flock", fail)
    with pytest.raises(JobError, match="cannot be locked"):
        RunFolder(tmp_path / "new", job(), resume="auto")
