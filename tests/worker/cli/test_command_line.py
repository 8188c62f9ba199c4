from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from jobs import commit, lone_store
from record_cases import MANIFEST, bare, run_folder, write_run, write_samples

from rljob_api.wire.driver_status import DriverStatus
from rljob_api.wire.exit_codes import ExitCode
from rljob_api.wire.run_status import RunOutcome
from rljob_api.wire.step_record import StepRecord
from rljob_worker.checkpoints.state import DriverState
from rljob_worker.cli import addresses
from rljob_worker.cli.main import main
from rljob_worker.driver.outcome import Outcome
from rljob_worker.records.http import DriverServer
from rljob_worker.records.profile_request import BusyError, ProfileRequest
from rljob_worker.records.steps import StepLog

REPOSITORY = Path(__file__).parents[3]
COMMANDS = (
    *(
        "run",
        "validate",
        "score",
        "eval",
        "env",
        "plan",
        "doctor",
        "save",
        "profile",
        "report",
        "view",
        "trace",
        "samples",
    ),
    "export",
)


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(MANIFEST))
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Message about a command that the user got wrong."""
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("rljob: ")
    return said.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: rljob {command}")
    assert len(text.splitlines()) >= 7
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    overview = capsys.readouterr().out
    assert f"\n    {command} " in overview
    assert "exit codes:" in overview


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["run"], ["samples", "x", "--worst", "2", "--best", "2"], ["export", "x"]]
)
def test_a_wrong_command_line_shows_the_usage(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert "usage: rljob" in capsys.readouterr().err


def test_validate(capsys: pytest.CaptureFixture[str], manifest: str) -> None:
    assert main(["validate", manifest]) == 0
    assert capsys.readouterr().out == f"{manifest}: sample-run is valid\n"
    assert main(["validate", manifest, "--set", "spec.steps=5"]) == 0
    capsys.readouterr()
    said = refused(capsys, "validate", manifest, "--set", "spec.steps=0", "--set", "spec.rollout.topP=7")
    assert "2 problems" in said
    assert "spec.steps: 0: is too small" in said
    assert "spec.rollout.topP: 7" in said
    assert "no such file" in refused(capsys, "validate", "missing.yaml")


def test_plan_says_whether_a_job_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    example = str(REPOSITORY / "examples" / "qwen3-4b-grpo-8x910b1.yaml")
    model = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728}
    model |= {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    model |= {"max_position_embeddings": 40960, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(model))
    command = ["plan", example, "--model", str(tmp_path)]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "actor_train" in text
    assert "of 61.00 GiB: fits, " in text
    assert "assumed:" in text
    assert main([*command, "--device-memory", "32Gi", "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is False
    assert plan["tables"][0]["limit"] == 32 * 2**30
    assert plan["tables"][0]["peak_phase"] == "actor_train"
    assert "spec.training.recompute=Full" in plan["remedies"]["alone"]


def test_plan_refuses_what_it_cannot_read(capsys: pytest.CaptureFixture[str], manifest: str, tmp_path: Path) -> None:
    example = str(REPOSITORY / "examples" / "qwen3-4b-grpo-8x910b1.yaml")
    assert "give a copy of its config with --model" in refused(capsys, "plan", example)
    assert "config.json: no such file" in refused(capsys, "plan", example, "--model", str(tmp_path))
    assert "--device-memory: '64 GB' is no amount" in refused(capsys, "plan", manifest, "--device-memory", "64 GB")


def test_run_refuses_before_it_starts(capsys: pytest.CaptureFixture[str], manifest: str, tmp_path: Path) -> None:
    assert "--resume: needs --output" in refused(capsys, "run", manifest, "--resume")
    assert "spec.steps" in refused(capsys, "run", manifest, "--set", "spec.steps=0", "--output", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_a_manifest_from_standard_input(
    capsys: pytest.CaptureFixture[str], manifest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = yaml.safe_load(Path(manifest).read_text())
    document["metadata"]["annotations"] = {"note": "\U0001f600"}
    compact = json.dumps(document)
    for text in (compact, json.dumps(document, indent=1), yaml.safe_dump(document)):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert main(["validate", "-"]) == 0
        assert capsys.readouterr().out == "-: sample-run is valid\n"
    for text, wrong in (("", "standard input holds no manifest"), ("job.yaml", "an RLJob"), (compact[:-1], "line")):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert wrong in refused(capsys, "run", "-", "--output", "x")


def test_what_runs_on_a_cluster_alone_is_valid_but_does_not_run_here(
    capsys: pytest.CaptureFixture[str], manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = ("--set", "spec.resources.nodes=2", "--set", "spec.resources.devicesPerNode=1")
    assert main(["validate", manifest, *two]) == 0
    capsys.readouterr()
    where = ("--output", str(tmp_path / "run"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "this machine is one node" in refused(capsys, "run", manifest, *two, *where)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "this machine is one node" in refused(capsys, "run", manifest, *two, *where, "--address", "local")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("address", ["local", "127.0.0.1:1"])
def test_sandboxes_of_a_warm_pool_are_the_operators_to_claim(
    address: str, capsys: pytest.CaptureFixture[str], manifest: str, tmp_path: Path
) -> None:
    data, calls = tmp_path / "data.jsonl", {"fn_name": "f", "inputs": [[1]], "outputs": [2]}
    data.write_text(json.dumps({"prompt": "a", "label": "b", "tests": calls}) + "\n")
    pool = (
        *("--set", f"spec.data={{path: {data}}}"),
        *("--set", "spec.reward={name: code, args: {kind: Calls, tests: tests}}"),
        *("--set", "spec.sandbox={isolation: Service, service: {warmPool: {name: pool}}}"),
    )
    said = "spec.sandbox.service.warmPool: the operator claims the sandboxes"
    assert main(["validate", manifest, *pool]) == 0
    assert f"warning: {said}" in capsys.readouterr().out
    output = tmp_path / "run"
    assert said in refused(capsys, "run", manifest, *pool, "--output", str(output), "--address", address)
    assert not output.exists()


@pytest.mark.parametrize("command", [["report"], ["samples"], ["export", "--to", "x"]])
def test_a_folder_without_a_run_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    assert "there is no such folder" in refused(capsys, command[0], str(tmp_path / "missing"), *command[1:])
    assert "not a run folder" in refused(capsys, command[0], str(tmp_path), *command[1:])


def test_report_draws_and_prints_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no step was finished yet" in refused(capsys, "report", str(run_folder(tmp_path)))
    write_run(tmp_path, 3)
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "actor_train" in text
    assert str(tmp_path / "report.html") in text
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_samples_of_a_step_worst_and_best(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_folder(tmp_path)
    assert "no trajectories yet" in refused(capsys, "samples", str(tmp_path))
    write_samples(tmp_path, 5, ["five"], [0.5])
    write_samples(tmp_path, 10, ["good", "bad\x1b[2J", "none", "fair"], [0.9, 0.1, float("nan"), 0.5])

    def responses(*options: str) -> list[str]:
        assert main(["samples", str(tmp_path), *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line.split(maxsplit=1)[1] for line in lines if line.startswith("response")]

    assert responses() == ["good", r"bad\x1b[2J", "none", "fair"]
    assert responses("--step", "5") == ["five"]
    assert responses("--worst", "2") == ["none", r"bad\x1b[2J"]
    assert responses("--best", "2") == ["good", "fair"]
    assert responses("--best", "99", "--step", "10") == ["good", "fair", r"bad\x1b[2J", "none"]
    assert "no trajectories of step 7; there are those of step 5, 10" in refused(
        capsys, "samples", str(tmp_path), "--step", "7"
    )
    assert "--worst: 0 is not a number of samples" in refused(capsys, "samples", str(tmp_path), "--worst", "0")


def test_export_says_which_checkpoints_there_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    target = tmp_path / "target"
    assert "no complete checkpoint yet" in refused(capsys, "export", str(folder), "--to", str(target))
    store = lone_store(folder / "checkpoints", keep=3)
    for step in (20, 40):
        commit(store, DriverState(step, step, {}, 1, 1))
    said = refused(capsys, "export", str(folder), "--step", "30", "--to", str(target))
    assert "no complete checkpoint of step 30; complete ones: 20, 40" in said
    assert "no spec.checkpoint.keepBest" in refused(capsys, "export", str(folder), "--best", "--to", str(target))
    target.mkdir()
    (target / "mine").write_text("x")
    assert "is not an empty folder" in refused(capsys, "export", str(folder), "--to", str(target))
    assert "is not an empty folder" in refused(capsys, "export", str(folder), "--to", str(target / "mine"))


def python(code: str, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **more}
    return subprocess.run(
        [sys.executable, "-c", code, *args], env=environment, capture_output=True, text=True, timeout=60
    )


def test_small_commands_do_not_wait_for_the_large_libraries(manifest: str, tmp_path: Path) -> None:
    write_samples(run_folder(tmp_path / "run"), 1, ["x"], [1.0])
    code = (
        "import json, sys\nfrom rljob_worker.cli.main import main\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    try: assert main(argv) == 0\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "large = {'torch', 'ray', 'transformers', 'vllm', 'megatron', 'datasets', 'matplotlib', 'tensorboard'}\n"
        "print('loaded:', sorted(large & set(sys.modules)))\n"
    )
    commands = [
        ["--version"],
        ["--help"],
        ["run", "--help"],
        ["validate", manifest],
        ["samples", str(tmp_path / "run")],
    ]
    ended = python(code, str(commands).replace("'", '"'))
    assert ended.stdout.splitlines()[0].startswith("rljob 0.")
    assert ended.stdout.splitlines()[-1] == "loaded: []", ended.stderr


MAIN = "import sys; from rljob_worker.cli.main import main; sys.exit(main())"


@pytest.mark.parametrize("wrong", ["drawing", "a folder in its place", "a damaged record", "no records"])
@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_report_that_cannot_be_drawn_changes_no_outcome(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    manifest: str,
    tmp_path: Path,
    wrong: str,
    code: int,
) -> None:
    folder = tmp_path / "run"
    write_run(folder, 2)

    def fail(*_: object) -> None:
        raise MemoryError("no room for the picture")

    if wrong == "drawing":
        monkeypatch.setattr("rljob_worker.report.build.plot_run", fail)
    elif wrong == "a folder in its place":
        (folder / "report.html").mkdir()
    elif wrong == "a damaged record":
        (folder / "steps.jsonl").write_text("[]\n")
    else:
        (folder / "steps.jsonl").unlink()
    ended = Outcome(code, RunOutcome.SUCCEEDED if code == 0 else RunOutcome.FAILED, "as it ended \x1b[2J\u202e")

    def run_job(*_: object, on_record: Callable[[StepRecord], None], **__: object) -> Outcome:
        on_record(bare(2))
        return ended

    monkeypatch.setattr("rljob_worker.driver.run.run_job", run_job)
    assert main(["run", manifest, "--output", str(folder)]) == code
    said = capsys.readouterr().out
    assert rf"{ended.outcome}: as it ended \x1b[2J\u202e" in said
    assert ("report  cannot be drawn: " in said) == (wrong != "no records")


def test_one_that_nobody_wants_is_not_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, manifest: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    write_run(folder, 2)

    def run_job(*_: object, on_record: Callable[[StepRecord], None], **__: object) -> Outcome:
        on_record(bare(2))
        return Outcome(0, RunOutcome.SUCCEEDED, "as it ended")

    monkeypatch.setattr("rljob_worker.driver.run.run_job", run_job)
    assert main(["run", manifest, "--output", str(folder), "--no-report"]) == 0
    said = capsys.readouterr().out
    assert "actor_train  " in said
    assert "report" not in said
    assert not [*folder.glob("report.*")]


def test_a_reader_who_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    write_samples(run_folder(tmp_path), 1, ["x" * 500] * 2000, [1.0] * 2000)
    path = os.pathsep.join(p for p in sys.path if p)
    running = subprocess.Popen(
        [sys.executable, "-c", MAIN, "samples", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running.stdout is not None
    assert running.stderr is not None
    assert running.stdout.readline() == b"step 1: 2000 of 2000 samples\n"
    running.stdout.close()
    assert (running.wait(timeout=60), running.stderr.read()) == (0, b"")


def test_a_terminal_without_the_characters_shows_escapes(tmp_path: Path) -> None:
    write_samples(run_folder(tmp_path), 1, ["日本"], [1.0])
    ended = python(MAIN, "samples", str(tmp_path), PYTHONIOENCODING="latin-1")
    assert ended.returncode == 0
    assert r"response  \u65e5\u672c" in ended.stdout


def test_what_strangers_wrote_does_not_reach_the_terminal(manifest: str) -> None:
    """In an error, in a line of the log, and in a traceback that is logged."""
    code = (
        "import logging, sys; from rljob_worker.cli import validate; from rljob_worker.errors import JobError\n"
        "from rljob_worker.cli.main import main; bad = 'line\\n\\x1b]0;title\\x07 \\u202eabc'\n"
        "def run(arguments):\n"
        "    logging.getLogger('x').error('said: %s', bad)\n"
        "    try: raise KeyError(bad) from ValueError(bad)\n"
        "    except KeyError: logging.getLogger('x').exception(bad)\n"
        "    raise JobError(bad)\n"
        "validate.run = run; sys.exit(main(['validate', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", code, manifest]
    ended = subprocess.run(command, capture_output=True, timeout=120, env=os.environ, check=False)
    assert ended.returncode == 1, ended.stderr
    said = ended.stderr.decode()
    assert said.count(r"\x1b]0;title\x07 \u202eabc") >= 4
    assert not set("\x1b\x07\u202e") & set(said)
    assert "said: line\n" in said, "line breaks stay"


def test_sys_exit_inside_a_command_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("rljob_worker.cli.validate.run", lambda _arguments: sys.exit(0))
    assert main(["validate", str(tmp_path / "job.yaml")]) == 1
    assert "ended by sys.exit(0) before it was done" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcome", "executed", "shown"),
    [(RunOutcome.FAILED, 0, False), (RunOutcome.FAILED, 1, True), (RunOutcome.SUCCEEDED, 0, True)],
)
def test_a_resume_that_fails_does_not_show_the_steps_of_the_attempt_before(
    capsys: pytest.CaptureFixture[str],
    manifest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcome: RunOutcome,
    executed: int,
    shown: bool,
) -> None:
    records = write_run(tmp_path / "run", 3)

    def attempt(*_: object, on_record: Callable[[StepRecord], None], **__: object) -> Outcome:
        for record in records[:executed]:
            on_record(record)
        return Outcome(0 if outcome is RunOutcome.SUCCEEDED else 1, outcome, "said at the end")

    monkeypatch.setattr("rljob_worker.driver.run.run_job", attempt)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    main(["run", manifest, "--output", str(tmp_path / "run"), "--resume"])
    said = capsys.readouterr().out
    assert f"{outcome}: said at the end" in said
    assert ("actor_train  " in said, "report.png" in said) == (shown, shown)


@pytest.mark.parametrize("argv", [["report", "x"], ["validate", "-"]])
def test_no_library_can_ask_the_person_at_the_terminal(argv: list[str]) -> None:
    program = (
        "import builtins, os, sys; from rljob_worker.cli import main as m;"
        f"m.main({argv!r});"
        "print('rest', repr(sys.stdin.read()), os.read(0, 9));"
        "builtins.input()"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], input="spec:\ny\n", capture_output=True, text=True, timeout=60
    )
    assert "rest '' b''" in said.stdout
    assert "EOFError" in said.stderr


def test_a_ray_that_is_gone_is_named_within_seconds(
    capsys: pytest.CaptureFixture[str], manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_REFUSED_SECONDS", 0.1)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["run", manifest, "--output", str(tmp_path / "run")]) == ExitCode.FAILED
    said = capsys.readouterr().err
    assert "RAY_ADDRESS: no Ray cluster answers at 127.0.0.1:1: Connection refused" in said
    assert "unset RAY_ADDRESS to have a Ray started for this job alone" in said
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_is_asked_for_with_the_folders_own_token(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLJOB_DRIVER_TOKEN", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    folder = run_folder(tmp_path / "run")
    assert "no driver of it runs on this machine: there is no http.json" in refused(capsys, "save", str(folder))
    asked: list[int] = []

    def profile(request: ProfileRequest) -> None:
        if request.last > 5:
            raise BusyError("another one is not done")
        asked.append(request.last)

    server = DriverServer(
        StepLog(folder),
        status=lambda: DriverStatus(True, 3, 10, "rollout", 1, 3, None, False),
        metrics=bytes,
        request_checkpoint=lambda: asked.append(1),
        want_engine_nodes=lambda nodes: None,
        request_profile=profile,
        trace=bytes,
        host="0.0.0.0",
        port=0,
        token=None,
        address_file=folder / "http.json",
        token_file=folder / "http.token",
    )
    server.start()
    try:
        assert main(["save", str(folder)]) == 0
        assert main(["profile", str(folder), "--steps", "4-5"]) == 0
        assert asked == [1, 5]
        capsys.readouterr()
        assert "another one is not done" in refused(capsys, "profile", str(folder), "--steps", "6")
        assert "ranks: 'all' must be" in refused(capsys, "profile", str(folder), "--steps", "5", "--ranks", "all")
        (folder / "http.token").write_text("another")
        assert main(["save", str(folder)]) == ExitCode.FAILED
        assert "answers 401" in capsys.readouterr().err
        address = (folder / "http.json").read_text()
    finally:
        server.close()
    (folder / "http.json").write_text(address)
    assert main(["save", str(folder)]) == ExitCode.FAILED
    assert "no driver answers at 127.0.0.1" in capsys.readouterr().err
    assert asked == [1, 5]


@pytest.mark.parametrize(("host", "named"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_an_endpoint_beyond_this_machine_is_named_by_the_plan(
    capsys: pytest.CaptureFixture[str], host: str, named: bool
) -> None:
    quickstart = str(REPOSITORY / "examples" / "quickstart.yaml")
    main(["plan", quickstart, "--json", "--set", f"spec.records.httpHost={host}"])
    assumed = json.loads(capsys.readouterr().out)["assumptions"]
    assert any("records.httpHost" in line for line in assumed) is named
