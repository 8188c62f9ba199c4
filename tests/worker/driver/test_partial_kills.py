"""Partial rollout and tail batching, killed at random instants: the same bits, and no prompt is lost or taken twice."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from jobs import REPOSITORY, events, final_state, finish, manifest, run, start_faulty
from spans import check_carried_log_probs
from support.samples import ALL
from support.step_lines import read_steps

from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.records.trajectories import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KILLS = 30 if ALL else 1
APART = 3
STEPS = APART * (KILLS + 1)
PARTIAL = {"maxResponseTokens": 24, "partial": {"factor": 2.5}, "staleness": {"max": 2}}
MODES = {"partial": PARTIAL, "tail": {"maxResponseTokens": 48, "tail": {"deferLongest": 0.4}}}
EXPERTS = "experts"
if ALL:
    # A checkpoint has the experts of responses that are complete and not trained on yet.
    MODES[EXPERTS] = {**PARTIAL, "routerReplay": True}
PHASES = {"rollout": 0.1, "reward": 0.0, "actor_train": 0.05, "checkpoint": 0.005, "update_weights": 0.01}


def job(folder: Path, mode: str, save_every: int = 2) -> Path:
    """A manifest in `folder`, of which a filter takes groups."""
    more = {}
    if mode == EXPERTS:
        more["model"] = yaml.safe_load((REPOSITORY / "examples" / "router-replay.yaml").read_text())["spec"]["model"]
    return manifest(
        folder,
        steps=STEPS,
        training={"precision": "fp32", "optimizer": {"lr": 1.0e-3}},
        checkpoint={"everySteps": save_every, "keep": STEPS},
        rollout={
            "promptsPerStep": 4,
            "samplesPerPrompt": 4,
            "oversampling": {"filter": "ZeroVariance", "limit": 50},
            **MODES[mode],
        },
        resources={"profile": "cpu", "nodes": 1, "devicesPerNode": 2},
        evaluation={"everySteps": 4, "maxPrompts": 2, "data": {"synthetic": {"rows": 8, "seed": 5}}},
        **more,
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run folder of each mode, left alone, with the weights of each step."""
    folders = {}
    for mode in MODES:
        folder = tmp_path_factory.mktemp(f"{mode}-calm")
        folders[mode] = folder / "run"
        code, output = run("run", job(folder, mode, save_every=1), "--output", folders[mode])
        assert code == 0, output
    return folders


def test_responses_grow_over_several_steps_and_say_so(calm: dict[str, Path]) -> None:
    folder = calm["partial"]
    metrics = [record["metrics"] for record in read_steps(folder)]
    assert any(m["rollout/carried_tokens"] for m in metrics)
    assert any(m["rollout/filtered_groups"] for m in metrics), "nothing was filtered"
    assert max(m["rollout/staleness/max"] for m in metrics) in (1, 2)
    for m in metrics:
        of_age = [m.get(f"rollout/staleness/tokens_{age}", 0.0) for age in range(3)]
        means = [m.get(f"train/train_rollout_logprob_abs_diff_age_{age}", 0.0) for age in range(3)]
        whole = sum(count * mean for count, mean in zip(of_age, means)) / sum(of_age)
        assert whole == pytest.approx(m["train/train_rollout_logprob_abs_diff"], rel=1e-4, abs=1e-9)
        assert means[0] < 1e-4, "the engine's own weights"
    assert any(m.get("train/train_rollout_logprob_abs_diff_age_1", 0.0) > 1e-3 for m in metrics)
    generated = sum(m["rollout/generated_tokens"] for m in metrics)
    assert generated == sum(m["rollout/response_tokens"] for m in metrics) + metrics[-1]["rollout/carried_tokens"]
    spans = []
    for step in range(1, STEPS + 1):
        samples = read_trajectories(folder, step)[1]
        assert sum(s["decision"] == "trained" for s in samples) == 16
        spans += [[span["version"] for span in s["spans"]] for s in samples]
        assert all(sum(span["tokens"] for span in s["spans"]) == s["response_tokens"] for s in samples)
        assert all(span["version"] in range(step - 3, step) for s in samples for span in s["spans"])
    assert any(len(versions) > 1 for versions in spans), "no response grew in two steps"
    last = Checkpoints(folder / "checkpoints").latest()
    assert last is not None
    assert [one["ordinal"] for one in last.carried] == last.data_cursor["ledger"]["open"] != []


def test_a_span_has_the_log_probabilities_of_its_own_weights(calm: dict[str, Path], tmp_path: Path) -> None:
    check_carried_log_probs(calm["partial"], [2, 3], tmp_path)


def test_long_responses_have_steps_of_their_own_and_are_sampled_by_their_weights(calm: dict[str, Path]) -> None:
    folder = calm["tail"]
    records = read_steps(folder)
    metrics = [record["metrics"] for record in records]
    long = [record["step"] for record in records if record["metrics"]["rollout/long_step"]]
    assert long, "no long step came"
    assert any(m["rollout/deferred_tokens"] for m in metrics)
    assert any(m["rollout/filtered_groups"] for m in metrics), "nothing was filtered"
    waiting = 0.0
    for m in metrics:
        assert not (m["rollout/long_step"] and m["rollout/deferred_groups"])
        assert m["rollout/waiting_groups"] <= waiting + m["rollout/deferred_groups"]
        waiting = m["rollout/waiting_groups"]
    means = {}
    for step in range(1, STEPS + 1):
        samples = read_trajectories(folder, step)[1]
        trained = [s for s in samples if s["decision"] == "trained"]
        assert len(trained) == 16
        assert {span["version"] for s in samples for span in s["spans"]} == {step - 1}, "a token of other weights"
        means[step] = sum(s["response_tokens"] for s in trained) / 16
    # Beside the short steps just before: lengths change as the policy learns.
    longer = []
    for before, step in pairwise([0, *long]):
        short = [means[other] for other in range(before + 1, step)]
        longer.append(means[step] - sum(short) / len(short))
    assert sum(longer) / len(longer) > 1, f"the long ones were not deferred: {longer}"
    last = Checkpoints(folder / "checkpoints").latest()
    assert last is not None
    assert [one["ordinal"] for one in last.carried] == last.data_cursor["ledger"]["open"] != []


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_was_killed_ends_as_the_calm_run(calm: dict[str, Path], tmp_path: Path, mode: str) -> None:
    path, folder = job(tmp_path, mode), tmp_path / "run"
    chance = random.Random(17)
    for kill in range(KILLS):
        phase = "rollout" if kill == 0 else chance.choice(list(PHASES))
        process = "driver" if kill == 0 else chance.choice(["driver", "trainer-1", "engine-0", "engine-1"])
        fault = {"do": "kill", "process": process, "phase": phase, "step": APART * (kill + 1)}
        fault["delay"] = chance.uniform(0.0, PHASES[phase])
        if phase == "checkpoint":
            fault["step"] += fault["step"] % 2
        resume = ["--resume"] if folder.exists() else []
        code, output = finish(start_faulty(path, folder, fault, *resume))
        print(fault, code)
        assert code != 0, output
        assert [event for event in events(folder) if event["event"] == "kill"][-1]["step"] == fault["step"] - 1
    code, output = run("run", path, "--output", folder, "--resume")
    assert code == 0, output
    assert final_state(folder, ranks=2) == final_state(calm[mode], ranks=2)
    carried = [Checkpoints(one / "checkpoints").latest() for one in (folder, calm[mode])]
    assert json.dumps(carried[0].carried) == json.dumps(carried[1].carried)  # type: ignore[union-attr]
    for one in (folder, calm[mode]):
        code, output = run("audit", one)
        assert code == 0, output
    assert read_steps(folder)[-1]["prompts"] == read_steps(calm[mode])[-1]["prompts"]
