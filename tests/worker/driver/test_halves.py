"""`rljob run --only rollout` and `--only train`: the two halves of a step give the bits of the whole."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from jobs import finish, manifest, start
from support.samples import unless_drawn

from rljob_worker.checkpoints.half_journal import FILE, Origin, check_origin, read_half, write_half
from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.cli.halves import HalfInputs
from rljob_worker.cli.main import main
from rljob_worker.errors import UserError
from rljob_worker.records.steps import read_steps

ORIGIN = Origin("w", "the weights that spec.model begins with", "t", {"spec.algorithm.clipHigh": 0.28})


def run(*arguments: str | Path) -> str:
    code, output = finish(start("run", *arguments))
    assert code == 0, output
    return output


def trained(folder: Path, step: int) -> tuple[Any, dict[str, Any], dict[str, float]]:
    """Checksums of all that a checkpoint holds, its cursor, and what training said of its step."""
    state = Checkpoints(folder / "checkpoints").whole(step).state
    record = next(record for record in read_steps(folder) if record.step == step)
    metrics = {name: value for name, value in record.metrics.items() if name.startswith(("train/", "rollout/raw"))}
    assert state.files
    return state.files, state.data_cursor, metrics


@pytest.mark.slow
@unless_drawn("two halves of a job")
def test_two_halves_are_the_whole_to_the_bit(tmp_path: Path) -> None:
    job = manifest(tmp_path, steps=2, checkpoint={"everySteps": 1, "keep": 9})
    whole, sampled, halves = (tmp_path / name for name in ("whole", "sampled", "halves"))
    run(job, "--output", whole)
    run(job, "--only", "rollout", "--steps", "2", "--output", sampled)
    assert not (sampled / "checkpoints").exists() or not any((sampled / "checkpoints").glob("step-*"))
    half = read_half(sampled)
    assert [step.versions for step in half.steps] == [[0], [0]]
    run(job, "--only", "train", "--from", sampled, "--output", halves)
    assert trained(halves, 1) == trained(whole, 1)

    # From a checkpoint, the second step: not that of the journal above, whose weights are the first's.
    assert "step 3/3  eta 0:00" in run(
        job, "--only", "rollout", "--checkpoint", halves, "--output", tmp_path / "second"
    )
    wrong = start("run", job, "--only", "train", "--from", tmp_path / "second", "--output", tmp_path / "no")
    code, output = finish(wrong)
    assert code == 2, output
    assert "begins with step 3, the job goes on with step 1" in output
    assert not (tmp_path / "no").exists(), "what was refused leaves nothing"


def test_progress_counts_to_the_last_step_of_the_half() -> None:
    after_12 = cast("Any", SimpleNamespace(state=SimpleNamespace(step=12)))
    of_two = cast("Any", SimpleNamespace(steps=[None, None]))
    assert [HalfInputs(None, None).last_step(sampled) for sampled in (1, 3)] == [1, 3]
    assert HalfInputs(after_12, None).last_step(1) == 13
    assert HalfInputs(None, of_two).last_step(1) == 2
    assert HalfInputs(after_12, of_two).last_step(1) == 14


def written(folder: Path, **origin: Any) -> Path:
    folder.mkdir(exist_ok=True)
    write_half(folder, replace(ORIGIN, **origin), {1: 4})
    return folder


def test_a_folder_without_samples_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--from: .*: there is no such folder; needed is the run folder"):
        read_half(tmp_path / "nothing")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match=r"--from: .* holds no rollout\.json; needed is the run folder"):
        read_half(tmp_path / "nothing")
    with pytest.raises(UserError, match="the journal lacks step 1"):
        read_half(written(tmp_path / "a"))
    (tmp_path / "a" / FILE).write_text("{}")
    with pytest.raises(UserError, match=r"rollout\.json: damaged"):
        read_half(tmp_path / "a")


def test_no_flipped_bit_of_it_is_read_as_something_else(tmp_path: Path) -> None:
    """Before its steps are looked for: those of a whole file would be missing here."""
    file = written(tmp_path / "a") / FILE
    whole = file.read_bytes()
    for bit in range(8 * len(whole)):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        with pytest.raises(UserError) as error:
            read_half(file.parent)
        # White space may become other white space.
        same = json.loads(content) == json.loads(whole) if "damaged" not in str(error.value) else False
        assert "damaged" in str(error.value) or same, bit
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        with pytest.raises(UserError, match="damaged"):
            read_half(file.parent)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
def test_what_is_no_file_in_its_place_is_not_read(tmp_path: Path, kind: str) -> None:
    file = written(tmp_path / "a") / FILE
    file.unlink()
    make = {"pipe": os.mkfifo, "device": lambda at: at.symlink_to("/dev/zero"), "folder": Path.mkdir}
    make.get(kind, lambda at: at.symlink_to(at.name))(file)
    with pytest.raises(UserError, match="--from"):
        read_half(file.parent)


@pytest.mark.parametrize(
    ("here", "step", "said"),
    [
        (
            {"weights": "x", "weights_named": "the weights of step 0 of b"},
            0,
            "begins with; the weights of step 0 of b are",
        ),
        ({"tokenizer": "x"}, 0, "another tokenizer than that of spec.model"),
        ({"algorithm": {"spec.algorithm.clipHigh": 0.2}}, 0, "spec.algorithm.clipHigh: 0.28 there, 0.2 here"),
        ({}, 1, "begins with step 1, the job goes on with step 2"),
    ],
)
def test_samples_of_something_else_are_refused_by_name(tmp_path: Path, here: Any, step: int, said: str) -> None:
    from rljob_worker.checkpoints.half_journal import HalfJournal
    from rljob_worker.checkpoints.journal import JournalStep

    half = HalfJournal(tmp_path, ORIGIN, (JournalStep(1, 0, 1, ()),), {1: 4})
    check_origin(half, ORIGIN, 0)
    with pytest.raises(UserError) as caught:
        check_origin(half, replace(ORIGIN, **here), step)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "2"], "--steps: only with --only rollout"),
        (["--only", "train", "--from", "x", "--steps", "2"], "--steps: only with --only rollout"),
        (["--only", "rollout", "--from", "x"], "--from: only with --only train"),
        (["--checkpoint", "x"], "--checkpoint: only with --only"),
        (["--only", "train"], "--only train: needs --from"),
        (["--only", "rollout", "--resume", "--output", "x"], "--resume: a half of a run is not continued"),
        (["--only", "rollout", "--set", "spec.rollout.partial={}"], "spec.rollout.partial: carries groups"),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(manifest(tmp_path)), *options]) == 2
    assert said in capsys.readouterr().err
