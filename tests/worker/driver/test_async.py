"""Mode Async with slow rewards, left alone and killed: no prompt lost or taken twice, no token over the bound."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import ONE_AND_ONE, events, final_state, finish, manifest, run, start_faulty
from lane_sums import ENGINE, check_lanes
from spans import check_carried_log_probs
from support.samples import ALL, SEED, unless_all, unless_drawn
from support.step_lines import read_steps
from support.trace_rules import check_trace

from rljob_api.wire.exit_codes import ExitCode
from rljob_worker.checkpoints.journal import JournalStep, journal_files, read_journal
from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.flow import TokenStream
from rljob_worker.records.trajectories import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 12
TURNS = 40 if ALL else 16
"""Steps of lanes that take turns at every instruction."""
MOST = 2
GROUPS, SAMPLES = 4, 4
IN_FLIGHT = 10
"""Groups in flight, of the 12 that the bound allows."""
TRAINER = {"batch_wait", "actor_train", "update_weights", "checkpoint"}
# Log-normal, mean 0.1 s and now and then ten times as much; several at once.
REWARD = """\
import asyncio, random

async def score(response, **_):
    await asyncio.sleep(min(1.0, random.lognormvariate(-2.8, 1.0)))
    return len(set(response)) % 3
"""
# Process, phase of its lane, and about how long the phase takes: the kill comes at a random instant within.
PLACES = [
    *((process, "actor_train", 0.05) for process in ("driver", "trainer-0", "engine-0", "reward")),
    *((process, "rollout", 0.3) for process in ("driver", "trainer-0", "engine-0", "reward")),
    *((process, "update_weights", 0.005) for process in ("driver", "trainer-0", "engine-0")),
    ("driver", "batch_wait", 0.1),
    ("driver", "checkpoint", 0.01),
    ("driver", "eval", 0.02),
]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("reward")
    (folder / "slow_reward.py").write_text(REWARD)
    return {
        "steps": STEPS,
        "mode": "Async",
        "training": {"precision": "fp32", "optimizer": {"lr": 1.0e-3}},
        "rollout": {
            "promptsPerStep": GROUPS,
            "samplesPerPrompt": SAMPLES,
            "maxResponseTokens": 48,
            "ignoreEos": True,
            "staleness": {"max": MOST, "inFlight": IN_FLIGHT},
        },
        "resources": ONE_AND_ONE,
        "checkpoint": {"everySteps": 2, "keep": 2},
        "records": {"trajectoriesEverySteps": 1, "journal": True},
        "evaluation": {"everySteps": 4, "maxPrompts": 2, "data": {"synthetic": {"rows": 8, "seed": 5}}},
        "reward": {"python": "slow_reward:score", "timeoutSeconds": 20},
        "environment": {"pythonPath": [str(folder)]},
    }


@pytest.fixture(scope="module")
def calm(spec: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("async")
    job = manifest(folder, **{**spec, "checkpoint": {"everySteps": 1, "keep": STEPS}})
    code, output = run("run", job, "--output", folder / "run")
    assert code == 0, output
    return folder / "run"


def check_whole(run_folder: Path, steps: int) -> None:
    """Every prompt up to the last step was trained on once, in order, within the bound."""
    code, output = run("audit", run_folder)
    assert code == 0, output
    latest = {record["step"]: record for record in read_steps(run_folder)}
    assert latest.keys() >= set(range(1, steps + 1))
    last = latest[steps]["prompts"]
    assert (last["open"], last["next"]) == ([], steps * GROUPS), "a prompt was lost, or one was begun for no step"
    for step in range(1, steps + 1):
        record = latest[step]
        assert record["prompts"]["trained"] == [[GROUPS * (step - 1), GROUPS * step]]
        assert record["metrics"]["rollout/staleness/max"] <= MOST
        samples = read_trajectories(run_folder, step)[1]
        assert len(samples) == GROUPS * SAMPLES
        for sample in samples:
            assert sample["decision"] == "trained"
            assert sum(span["tokens"] for span in sample["spans"]) == sample["response_tokens"]
            assert all(step - 1 - MOST <= span["version"] <= step - 1 for span in sample["spans"])


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=unless_drawn(f"lanes in turns: {mode}")) for mode in ("Async", "Disaggregated")]
)
def test_lanes_that_take_turns_at_every_instruction_do_each_other_no_harm(mode: str, tmp_path: Path) -> None:
    rollout = {"promptsPerStep": 32, "samplesPerPrompt": 8, "maxResponseTokens": 4, "ignoreEos": True}
    rollout["staleness"] = {"max": 2, "order": "ReadyFirst"} if mode == "Async" else {"max": 1}
    job = manifest(tmp_path, mode=mode, resources=ONE_AND_ONE, steps=TURNS, rollout=rollout)
    code, output = finish(start_faulty(job, tmp_path / "run", {"do": "interleave", "seconds": 5e-5}))
    assert code == 0, output
    assert len(read_steps(tmp_path / "run")) == TURNS


def test_generation_goes_on_through_updates_and_no_token_is_over_the_bound(calm: Path) -> None:
    check_whole(calm, STEPS)
    records = read_steps(calm)
    spans = [
        [span["version"] for span in sample["spans"]]
        for step in range(1, STEPS + 1)
        for sample in read_trajectories(calm, step)[1]
    ]
    assert all(versions == sorted(versions) for versions in spans)
    assert any(len(versions) > 1 for versions in spans), "no response went on through an update"
    assert max(record["metrics"]["rollout/staleness/max"] for record in records) >= 1, "nothing ran ahead"
    for metrics in (record["metrics"] for record in records):
        assert "train/tis" not in metrics, "the ratio starts from the engine's log-probabilities"
        if metrics["rollout/staleness/max"]:
            assert metrics["train/ppo_kl"] != 0.0, "the ratio is that of the sampled token"
    generated = sum(record["metrics"]["rollout/generated_tokens"] for record in records)
    assert generated == sum(record["metrics"]["rollout/response_tokens"] for record in records), "tokens thrown away"
    store = Checkpoints(calm / "checkpoints")
    for step in store.complete_steps():
        state = store.read(step)
        assert [one["ordinal"] for one in state.carried] == state.data_cursor["ledger"]["open"]
        assert len(state.carried) <= IN_FLIGHT - GROUPS, "the step's own were trained on"


def test_phases_of_a_lane_fit_into_the_step(calm: Path) -> None:
    check_lanes(read_steps(calm), {"trainer": TRAINER, "engine": ENGINE})
    check_trace(calm)


def test_a_span_has_the_log_probabilities_of_its_own_weights(calm: Path, tmp_path: Path) -> None:
    check_carried_log_probs(calm, [3, 4, 5, 6], tmp_path)


def test_a_step_is_sampled_again_and_another_token_is_found(calm: Path, tmp_path: Path) -> None:
    """The step is of several versions of the weights; the journal differs from the engine in one sample."""
    shutil.copytree(calm, tmp_path / "run")
    step = max(step for step in range(1, STEPS + 1) if len(_journal(calm, step).versions) > 1)
    head, *groups = _lines(path := journal_files(tmp_path / "run")[step])
    episode = groups[1]["episodes"][2]
    stream = TokenStream.from_json(episode["stream"])
    ids = stream.ids.copy()
    ids[-1] += 1 if ids[-1] < 9 else -1
    episode["stream"] = replace(stream, ids=ids).as_json()
    path.write_bytes(gzip.compress("".join(f"{json.dumps(line)}\n" for line in (head, *groups)).encode()))
    code, output = run("replay", tmp_path / "run", "--step", str(step))
    assert code == ExitCode.FAILED, output
    tokens = GROUPS * SAMPLES * 48
    assert f"sampled again: {tokens - 1} of {tokens} tokens are the same" in output
    assert re.search(rf"first other one: .* sample 2, .*: {ids[-1]} in the journal, {stream.ids[-1]} now", output), (
        output
    )
    assert not list((tmp_path / "run").glob("*.tmp"))


@unless_drawn("lanes that are stopped")
def test_a_stop_saves_the_last_step_with_what_is_open_and_the_rest_follows(
    spec: dict[str, Any], tmp_path: Path
) -> None:
    """SIGTERM in training, and one while trainers wait, or one of them; a process that is killed between."""
    job, folder = manifest(tmp_path, **spec), tmp_path / "run"
    chance = random.Random(SEED)
    stops: list[tuple[str | None, int]] = [("actor_train", 3), ("batch_wait", 11)]
    places = sorted([(None, 7), *(stops if ALL else chance.sample(stops, 1))], key=lambda place: place[1])
    process, phase, lasts = chance.choice(PLACES)
    print(f"RLJOB_SEED={SEED}: {process} is killed in {phase}")
    for stopped, step in places:
        if stopped is None:
            faults = _kill(process, phase, 8 if phase in ("checkpoint", "eval") else step, chance.uniform(0, lasts))
        else:
            faults = [{**_kill("driver", stopped, step, 0.01)[0], "signal": signal.SIGTERM}]
        resume = ["--resume"] if folder.exists() else []
        code, output = finish(start_faulty(job, folder, faults, *resume))
        assert code == ExitCode.STOPPED if stopped else code != 0, (faults, output)
        newest = Checkpoints(folder / "checkpoints").latest()
        assert newest is not None
        last = read_steps(folder)[-1]["step"]
        assert not stopped or newest.step in (last, last + 1), "a stop saves the last step, on record or not yet"
    code, output = run("run", job, "--output", folder, "--resume")
    assert code == 0, output
    check_whole(folder, STEPS)
    # From the starting weights, through all attempts.
    for checkpoint in (folder / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    code, output = run("replay", folder, "--step", str(STEPS))
    assert code == 0, output
    assert "from the starting weights" in output
    assert re.search(rf"trained again: ({STEPS - 2}|{STEPS - 1}) steps; (\d+) of \2 metrics as in the records", output)
    assert f"sampled again: {(tokens := GROUPS * SAMPLES * 48)} of {tokens} tokens are the same" in output


@unless_all("500 steps and 20 kills")
def test_500_steps_and_20_kills_lose_nothing(spec: dict[str, Any], tmp_path: Path) -> None:
    steps, kills = 500, 20
    spec = {**spec, "steps": steps, "checkpoint": {"everySteps": 5, "keep": 2}}
    job, folder, chance = manifest(tmp_path, **spec), tmp_path / "run", random.Random(SEED)
    for number in range(kills):
        process, phase, lasts = PLACES[number % len(PLACES)]
        step = 20 * (number + 1) + chance.randrange(-4, 5)
        step += {"checkpoint": -step % 5, "eval": -step % 4}.get(phase, 0)
        resume = ["--resume"] if folder.exists() else []
        faults = _kill(process, phase, step, chance.uniform(0, lasts))
        code, output = finish(start_faulty(job, folder, faults, *resume), 600)
        assert code != 0, (faults, output)
        told = [(event["process"], event["alive"]) for event in events(folder) if event["event"] == "kill"]
        print(f"RLJOB_SEED={SEED}: step {step}, killed in {phase}: {told[-len(faults) :]}, exit code {code}")
    code, output = run("run", job, "--output", folder, "--resume")
    assert code == 0, output
    check_whole(folder, steps)
    assert final_state(folder)["step"] == str(steps)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def _journal(run_folder: Path, step: int) -> JournalStep:
    return read_journal(journal_files(run_folder)[step])


def _kill(process: str, phase: str, step: int, delay: float) -> list[dict[str, Any]]:
    """One that scores nothing at that instant is replaced: the driver is killed a step later."""
    killed = [{"do": "kill", "process": process, "phase": phase, "step": step, "delay": delay}]
    after = [{"do": "kill", "process": "driver", "phase": "actor_train", "step": step + 1}]
    return killed + after if process == "reward" else killed
