"""`rljob run --sweep`: what is refused before the first run, the runs that there are, and their table."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from rljob_api.wire.step_record import StepRecord
from rljob_worker.cli import sweep
from rljob_worker.cli.main import main
from rljob_worker.cli.sweep import planned, run_to_its_end
from rljob_worker.errors import UserError

LR = "spec.training.optimizer.lr"
QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(QUICKSTART.read_text())))
    return str(path)


def test_combinations_in_order_each_with_its_folder(tmp_path: Path) -> None:
    runs = planned([f"{LR}=1e-6,3e-6", "spec.hccl.env=[a,b],{c: 'd,e'}"], tmp_path)
    assert [one.values for one in runs] == [
        (f"{LR}=1e-6", "spec.hccl.env=[a,b]"), (f"{LR}=1e-6", "spec.hccl.env={c: 'd,e'}"),
        (f"{LR}=3e-6", "spec.hccl.env=[a,b]"), (f"{LR}=3e-6", "spec.hccl.env={c: 'd,e'}"),
    ]  # fmt: skip
    names = [one.folder.name for one in runs]
    assert names[0] == "01-lr_1e-6-env_a_b"
    assert len(set(names)) == 4


@pytest.mark.parametrize(
    ("sweeps", "said"),
    [
        ([LR], "is not PATH=V1,V2, like"),
        ([f"{LR}="], "is not PATH=V1,V2"),
        ([f"{LR}=1,,2"], "is not PATH=V1,V2"),
        ([f"{LR}=1,1"], "has a value twice"),
        ([f"{LR}=1", f"{LR}=2"], "spec.training.optimizer.lr is given twice"),
        (
            [f"spec.seed={','.join(map(str, range(9)))}", f"spec.steps={','.join(map(str, range(9)))}"],
            "81 combinations",
        ),
    ],
)
def test_options_that_are_none(sweeps: Sequence[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        planned(sweeps, tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sweep", f"{LR}=1e-3,7"], f"--sweep: with {LR}=7: "),
        (["--sweep", "spec.stepz=3,4"], "--sweep: with spec.stepz=3: "),
        (["--sweep", f"{LR}=1e-6,3e-6,0.000001"], f"--sweep: {LR}=1e-6 and {LR}=0.000001 are the same job"),
        (["--sweep", "spec.steps=1,2", "--resume", "--output", "x"], "`--resume auto` continues the runs"),
    ],
)
def test_wrong_values_are_named_before_the_first_run(
    options: list[str], said: str, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", job, "--output", str(tmp_path / "out"), *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_reaches_the_run_once_and_its_end_is_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    code = (
        "import pathlib, signal, sys, time\n"
        "def stop(*_):\n"
        "    time.sleep(0.5)\n"
        "    with open(sys.argv[2], 'a') as file: file.write('x')\n"
        "    sys.exit(75)\n"
        f"signal.signal({int(number)}, stop)\n"
        "pathlib.Path(sys.argv[1]).write_text('')\n"
        "time.sleep(100)\n"
    )

    def stop() -> None:
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=stop, daemon=True).start()
    assert run_to_its_end([sys.executable, "-c", code, str(ready), str(saved)]) == 75
    assert saved.read_text() == "x"
    assert signal.getsignal(number) == before


def test_each_run_is_a_command_and_the_table_has_them_all(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def ended(command: list[str]) -> int:
        commands.append(command)
        folder = Path(command[command.index("--output") + 1])
        folder.mkdir(parents=True)
        number = len(commands)
        metrics = {"rollout/raw_reward": number / 4, "eval/held": 0.5}
        record = StepRecord(1, 1, 1.0, 1.5, {}, 1.5, 0.0, metrics=metrics, index=0)
        (folder / "steps.jsonl").write_text(json.dumps(record.to_json()) + "\n")
        return 0 if number == 1 else 1

    monkeypatch.setattr(sweep, "run_to_its_end", ended)
    arguments = [
        "--set",
        "spec.steps=1",
        "--no-report",
        "--sweep",
        f"{LR}=1e-6,3e-6",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(["run", job, *arguments]) == 1, capsys.readouterr().err
    assert [command[command.index("--set") + 3] for command in commands] == [f"{LR}=1e-6", f"{LR}=3e-6"]
    assert all("spec.steps=1" in command and command[-1] == "--no-report" for command in commands)
    said = capsys.readouterr()
    assert not said.err
    table = [line.split() for line in said.out.splitlines()[2:]]
    assert table[0] == ["run", "state", "steps", "seconds", "reward", "eval/held"]
    assert table[1] == [f"{LR}=1e-6", "done", "1", "1.5", "0.25", "0.5"]
    assert table[2] == [f"{LR}=3e-6", "exit", "1", "1", "1.5", "0.5", "0.5"]
    assert main(["run", job, *arguments]) == 2
    assert "holds a run; name another --output, or add --resume auto" in capsys.readouterr().err
