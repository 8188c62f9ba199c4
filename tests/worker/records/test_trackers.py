"""Experiment trackers with their real packages, offline, and against servers that are not there."""

from __future__ import annotations

import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.ports import free_port
from support.samples import drawn, unless_all

from rljob_api import RLJobSpec
from rljob_api.problems import ManifestError
from rljob_api.validation import load_manifest
from rljob_api.wire.names import DRIVER_TOKEN_VARIABLE
from rljob_api.wire.step_record import StepRecord
from rljob_worker.driver.preflight import check_trackers
from rljob_worker.errors import UserError
from rljob_worker.records.trackers.feed import Delivery, TrackerFeed
from rljob_worker.records.trackers.packages import python_with
from rljob_worker.records.trackers.trackers import Trackers, config_of, row_of

REPOSITORY = Path(__file__).resolve().parents[3]
NAMES = ("wandb", "mlflow", "clearml", "swanlab", "trackio")
DRAWN = drawn("trackers", NAMES, 2)
STEPS = ((1, 2, 3), (3, 4))
"""Steps of two attempts."""
PYTHON = Path(os.environ.get("RLJOB_TRACKERS_PYTHON", Path(sys.prefix) / "trackers" / "bin" / "python"))
"""Python of the environment that `make tracker-packages` makes."""
SAMPLE = {
    "prompt": "2 + 2 =", "label": "4", "response": "it is \ud800 4", "reward": 1.0, "reward_parts": {"format": 0.5},
    "finish_reason": "stop", "response_tokens": 3, "advantage": 0.1,
}  # fmt: skip

in_test_faults = unless_all("Trackio waits 30 s for a server that is gone")
with_packages = pytest.mark.skipif(not PYTHON.is_file(), reason="needs `make tracker-packages`")


def spec_of(*trackers: dict[str, Any], **blocks: Any) -> RLJobSpec:
    spec = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())["spec"]
    return RLJobSpec.model_validate(spec | {"records": {"trackers": list(trackers)}} | blocks)


def record(step: int, attempt: int = 1) -> StepRecord:
    metrics = {"train/loss": 1 / step, "rollout/raw_reward": float(attempt), "train/kl_loss": None}
    return StepRecord(step, attempt, 1.7e9 + step, 1.0, {"rollout": 0.5}, 0.5, 0.0, metrics)


def read_back(name: str, folder: Path) -> dict[str, Any]:
    reader = Path(__file__).parent / "read_tracker.py"
    printed = subprocess.run([PYTHON, reader, name, folder], check=True, capture_output=True, text=True, timeout=60)
    return dict(json.loads(printed.stdout.splitlines()[-1]))


def steps_in(database: Path) -> list[int]:
    """Steps that Trackio has stored."""
    if not database.exists():
        return []
    with closing(sqlite3.connect(database)) as connection, suppress(sqlite3.OperationalError):
        return [step for (step,) in connection.execute("SELECT step FROM metrics ORDER BY step")]
    return []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def deliveries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Delivery]]]:
    """Trackers beside each other; a second attempt does step 3 again."""
    folder, found = tmp_path_factory.mktemp("run"), []
    for attempt, steps in enumerate(STEPS, 1):
        # An offline session of ClearML cannot be continued, and takes ten seconds to close.
        names = DRAWN if attempt == 1 else [name for name in DRAWN if name != "clearml"]
        spec = spec_of(
            *(
                {"name": name, "offline": True, "samples": 2, "samplesEverySteps": 2, "finishSeconds": 120}
                for name in names
            )
        )
        trackers = Trackers(folder, spec, "my-run", lambda text: None, str(PYTHON))
        for step in steps:
            trackers(record(step, attempt))
            trackers.samples(step, [SAMPLE] * 5)
        found.append(trackers.close(failed=False))
    return folder, found


@with_packages
@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_a_tracker_gets_config_scalars_and_samples_and_a_restart_continues_its_run(
    deliveries: tuple[Path, list[list[Delivery]]], name: str
) -> None:
    folder, attempts = deliveries
    delivered = [one for attempt in attempts for one in attempt if one.name == name]
    steps = [step for attempt in STEPS[: len(delivered)] for step in attempt]
    log = (folder / "logs" / f"tracker-{name}.log").read_text()
    everything = [(4, 4, True, ""), (3, 3, True, "")][: len(delivered)]
    assert [(one.offered, one.delivered, one.finished, one.said()) for one in delivered] == everything, log
    found = read_back(name, folder / "trackers" / name)
    assert found["scalars"] == [pytest.approx([step, 1 / step]) for step in steps]
    assert found["tables"] == len(delivered)
    assert found["config"]["steps"] == 200
    assert found["name"] == "my-run"
    known = json.loads((folder / "trackers" / f"{name}.json").read_text())["id"]
    assert set(found["ids"]) == {known}


SERVER = """
import sys, trackio
trackio.show(open_browser=False, block_thread=False, host="127.0.0.1", server_port=int(sys.argv[1]), share=False)
sys.stdin.read()
"""


@contextmanager
def trackio_server(folder: Path) -> Iterator[tuple[str, str]]:
    """Trackio's own server: address and token. A closed standard input ends it."""
    port = free_port()
    environment = {**os.environ, "TRACKIO_DIR": str(folder)}
    command = [PYTHON, "-P", "-c", SERVER, str(port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as server:
        assert server.stdout is not None
        token = next(match[1] for line in server.stdout if (match := re.search(r"write_token=([\w-]+)", line)))
        try:
            yield f"http://127.0.0.1:{port}", token
        finally:
            server.kill()


@with_packages
@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=in_test_faults)])
def test_a_server_gets_a_run_and_what_it_does_not_take_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    with trackio_server(tmp_path / "server") as (url, token):
        monkeypatch.setenv("TRACKIO_WRITE_TOKEN", token)
        spec = spec_of({"name": "trackio", "url": url, "finishSeconds": 120})
        trackers = Trackers(tmp_path / "run", spec, "my-run", lambda text: None, str(PYTHON))
        for step in (1, 2):
            trackers(record(step))
        wait_for(lambda: steps_in(tmp_path / "server" / "rljob.db") == [1, 2])
        if not killed:
            assert [delivery.said() for delivery in trackers.close(failed=False)] == [""]
            return
    trackers(record(3))
    (delivery,) = trackers.close(failed=False)
    assert not delivery.finished
    assert "the server did not take all" in delivery.said()


@with_packages
@pytest.mark.slow
def test_no_server_and_a_silent_server_end_nothing_and_delay_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("WANDB_API_KEY", "CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY", "SWANLAB_API_KEY"):
        monkeypatch.setenv(key, "0" * 40)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # Who connects is never answered: the worst of networks.
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        spec = spec_of(*({"name": name, "url": url, "finishSeconds": 8} for name in NAMES))
        trackers = Trackers(tmp_path, spec, "my-run", lambda text: None, str(PYTHON))
        pids = [feed._process.pid for _, feed in trackers._feeds if feed._process]
        begun = time.monotonic()
        for step in range(1, 4001):
            trackers(record(step))
        assert time.monotonic() - begun < 10
        begun = time.monotonic()
        deliveries = trackers.close(failed=False)
        assert time.monotonic() - begun < 20
    assert len(pids) == len(NAMES)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    for delivery in deliveries:
        assert f"tracker {delivery.name}: " in delivery.said(), delivery
        assert "4000 of 4000 messages were not delivered" in delivery.said()
        assert caplog.text.count(delivery.said()) == 1
        assert delivery.dropped >= 1000
        # Trackio refuses a server without a token, if it was imported in time; the others wait for an answer.
        reasons = ["did not finish in time", *(["write token"] if delivery.name == "trackio" else [])]
        assert any(reason in delivery.first_failure for reason in reasons), delivery


def test_a_tracker_that_cannot_start_is_named_once_and_all_it_missed_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opening = {"project": "p", "run": "r", "workspace": None, "url": None, "offline": True, "config": {}}
    feed = TrackerFeed(tmp_path, "nothing_of_this_name", opening, 5.0, lambda text: None)
    for step in range(1, 11):
        feed.send({"step": step, "time": 1.0, "scalars": {}})
    feed.finish(failed=False)
    delivery = feed.close(time.monotonic() + 30)
    assert delivery.said().startswith("tracker nothing_of_this_name: 10 of 10 messages were not delivered")
    assert "ModuleNotFoundError: No module named 'rljob_worker.records.trackers.nothing_of_this_name'" in (
        delivery.first_failure
    )
    assert caplog.text.count("training goes on") == 1


def test_a_run_folder_that_cannot_be_written_costs_the_tracker_alone(tmp_path: Path) -> None:
    (tmp_path / "trackers").write_text("a file")
    trackers = Trackers(tmp_path, spec_of({"name": "wandb", "offline": True}), "r", lambda text: None)
    trackers(record(1))
    (delivery,) = trackers.close(failed=False)
    assert "1 of 1 messages were not delivered" in delivery.said()
    assert str(tmp_path / "trackers") in delivery.first_failure


def test_a_package_that_is_missing_is_refused_by_name_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # W&B and Trackio leave a folder of their name where they are started: it is no package.
    for name in NAMES:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for name in NAMES:
        with pytest.raises(UserError, match=rf"trackers\[0\].name: {name}: .* pip install 'rljob\[{name}\]'"):
            check_trackers(spec_of({"name": name}))
    check_trackers(spec_of())


@with_packages
def test_a_package_is_taken_from_the_environment_of_the_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make tracker-packages` made it inside of this one, whose pins no tracker may change."""
    (tmp_path / "trackers").symlink_to(PYTHON.parents[1])
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for name in NAMES:
        check_trackers(spec_of({"name": name}))
        assert python_with(name) == str(tmp_path / "trackers" / "bin" / "python")
    assert python_with("nothing_of_this_name") is None


def test_each_tracker_is_an_extra() -> None:
    extras = (REPOSITORY / "pyproject.toml").read_text()
    assert all(f"\n{name} = [" in extras for name in NAMES)
    locked = (REPOSITORY / "requirements" / "trackers.txt").read_text()
    assert all(f"\n{name}==" in f"\n{locked}" for name in ("wandb", "mlflow-skinny", "clearml", "swanlab", "trackio"))


def test_neither_variables_nor_tokens_leave_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(spec_of(environment={"variables": {"PRIVATE": "secret-of-the-job"}}))
    assert config["rollout"]["promptsPerStep"] == 32
    assert "secret-of-the-job" not in json.dumps(config)
    monkeypatch.setenv(DRIVER_TOKEN_VARIABLE, "token-of-the-driver")
    given: list[dict[str, str]] = []

    def popen(*args: Any, **options: Any) -> None:
        given.append(options["env"])
        raise OSError(2, "no process in this test")

    monkeypatch.setattr(subprocess, "Popen", popen)
    Trackers(tmp_path, spec_of({"name": "wandb"}), "r", lambda text: None, sys.executable).close(failed=False)
    assert given
    assert DRIVER_TOKEN_VARIABLE not in given[0]
    assert given[0]["PATH"] == os.environ["PATH"]


def test_cells_of_a_sample_table_are_what_every_tracker_takes() -> None:
    row = row_of({**SAMPLE, "reward": float("nan"), "label": {"answer": [1]}, "response": "x" * 20_000, "prompt": True})
    assert row["reward"] is None
    assert (row["label"], row["prompt"]) == ('{"answer": [1]}', "true")
    assert len(str(row["response"])) == 10_000
    assert row["reward_parts"] == '{"format": 0.5}'
    assert row_of(SAMPLE)["response"] == "it is \\ud800 4"


@pytest.mark.parametrize(
    ("tracker", "field"), [({"name": "mlflow", "url": "http://user:key@a"}, "url"), ({"name": "neptune"}, "name")]
)
def test_what_a_tracker_cannot_be_is_refused(tracker: dict[str, str], field: str) -> None:
    manifest = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())
    manifest["spec"]["records"] = {"trackers": [tracker]}
    with pytest.raises(ManifestError, match=rf"spec.records.trackers\[0\].{field}"):
        load_manifest(yaml.safe_dump(manifest))


def test_a_key_in_the_manifest_is_refused() -> None:
    manifest = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())
    manifest["spec"] |= {"environment": {"variables": {"WANDB_API_KEY": "the-key"}}}
    load_manifest(yaml.safe_dump(manifest))
    manifest["spec"] |= {"records": {"trackers": [{"name": "wandb"}]}}
    with pytest.raises(ManifestError, match=r"spec.records.trackers: .* has the key of one") as refused:
        load_manifest(yaml.safe_dump(manifest))
    assert "the-key" not in str(refused.value)
