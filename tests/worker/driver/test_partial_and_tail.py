"""Partial rollout and tail batching, left alone: what grows, what waits, and whose weights sampled it.

What happens to them when something goes wrong: `test_fault_matrix.py`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from calm_runs import calm_run
from fault_rows import steps_of
from spans import check_carried_log_probs
from support.samples import unless_drawn
from support.step_lines import read_steps

from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.records.trajectories import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = steps_of("partial")
in_partial = unless_drawn("left alone: partial rollout")


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calm_run("partial", tmp_path_factory)


@pytest.fixture(scope="module")
def tail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calm_run("tail", tmp_path_factory)


@in_partial
def test_responses_grow_over_several_steps_and_say_so(partial: Path) -> None:
    metrics = [record["metrics"] for record in read_steps(partial)]
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
        samples = read_trajectories(partial, step)[1]
        assert sum(s["decision"] == "trained" for s in samples) == 16
        spans += [[span["version"] for span in s["spans"]] for s in samples]
        assert all(sum(span["tokens"] for span in s["spans"]) == s["response_tokens"] for s in samples)
        assert all(span["version"] in range(step - 3, step) for s in samples for span in s["spans"])
    assert any(len(versions) > 1 for versions in spans), "no response grew in two steps"
    last = Checkpoints(partial / "checkpoints").latest()
    assert last is not None
    assert [one["ordinal"] for one in last.carried] == last.data_cursor["ledger"]["open"] != []


@in_partial
def test_a_span_has_the_log_probabilities_of_its_own_weights(partial: Path, tmp_path: Path) -> None:
    check_carried_log_probs(partial, [2, 3], tmp_path)


@unless_drawn("left alone: tail batching")
def test_long_responses_have_steps_of_their_own_and_are_sampled_by_their_weights(tail: Path) -> None:
    records = read_steps(tail)
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
        samples = read_trajectories(tail, step)[1]
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
    last = Checkpoints(tail / "checkpoints").latest()
    assert last is not None
    assert [one["ordinal"] for one in last.carried] == last.data_cursor["ledger"]["open"] != []
