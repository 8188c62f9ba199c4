"""Steps that a replay goes through, and its findings; whole replays are in test_async.py."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import commit, lone_store

from rljob_api.spec import RewardSpec
from rljob_api.wire.step_record import Changed, StepRecord
from rljob_worker.checkpoints.journal import journal_files, read_journal, write_journal
from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.checkpoints.state import DriverState
from rljob_worker.driver.replay import Comparison, asked_spans, plan_replay
from rljob_worker.errors import UserError
from rljob_worker.flow import Decision, Group
from rljob_worker.host.files import WriteFailures
from rljob_worker.rollouts.step import Step
from rljob_worker.types import Generation, Prompt, RewardResult

PROMPT = Prompt("s/0", "s", "text", (5, 6), None, RewardSpec(name="match"))


def step_of(number: int, *versions: int) -> Step:
    """A step of one group of two samples, with a token of each of these weights."""
    one = Group.begun(7, PROMPT, samples=2, seed=2**61 + 1, version=versions[0])
    for version in versions:
        for sample in range(2):
            end = "length" if version == versions[-1] else ""
            part = Generation(np.array([version + sample]), np.array([-0.1], np.float32), end)
            one = one.extended({sample: part}, version)
    step = Step(number, number - 1)
    one = replace(one, results=(RewardResult(0.5), RewardResult(1.0)))
    step.take(one, Decision.FILTERED, PROMPT)
    return step


def written(folder: Path, steps: dict[int, tuple[int, ...]], attempts: dict[int, int] | None = None) -> None:
    """A run folder with a journal of these steps and the versions of their tokens, and records of attempt 1."""
    folder.mkdir(exist_ok=True)
    lines = []
    for number, versions in steps.items():
        write_journal(folder, step_of(number, *versions), (attempts or {}).get(number, 1), WriteFailures())
        record = StepRecord(number, 1, 1.0, 1.0, {}, 1.0, 0.0, metrics={}, index=len(lines))
        lines.append(json.dumps(record.to_json()))
    (folder / "steps.jsonl").write_text("".join(f"{line}\n" for line in lines))


def saved(folder: Path, *steps: int) -> Checkpoints:
    store = lone_store(folder / "checkpoints", keep=9)
    for step in steps:
        commit(store, DriverState(step, step, {}, 1, 1))
    return store


def test_the_journal_has_every_bit_of_a_step(tmp_path: Path) -> None:
    step = step_of(9, 7, 8)
    write_journal(tmp_path, step, 3, WriteFailures())
    assert journal_files(tmp_path).keys() == {9}
    found = read_journal(journal_files(tmp_path)[9])
    assert (found.number, found.weight_version, found.attempt, found.versions) == (9, 8, 3, [7, 8])
    (one,) = found.groups
    assert (one.prompt_uid, one.decision, one.seed) == ("s/0", Decision.FILTERED, 2**61 + 1)
    assert [one] == step.groups


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"", lambda b: b[:20] + b"x" + b[21:]])
def test_a_damaged_file_is_named(damage: Any, tmp_path: Path) -> None:
    write_journal(tmp_path, step_of(9, 7, 8), 3, WriteFailures())
    path = journal_files(tmp_path)[9]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"step-000009\.jsonl\.gz: damaged"):
        read_journal(path)


@pytest.mark.parametrize("line", ["[]", "{}", '{"step": 9}', "7"])
def test_a_file_of_something_else_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "step-000009.jsonl.gz"
    path.write_bytes(gzip.compress(f"{line}\n{line}\n".encode()))
    with pytest.raises(UserError, match="damaged"):
        read_journal(path)


def test_a_replay_begins_at_the_newest_checkpoint_before_the_oldest_token(tmp_path: Path) -> None:
    written(tmp_path, {number: (max(0, number - 3), number - 1) for number in range(1, 10)})
    root = saved(tmp_path, 2, 4, 6, 8)
    plan = plan_replay(tmp_path, root, 9)
    assert (plan.start, [one.number for one in plan.trained]) == (6, [7, 8])
    plan = plan_replay(tmp_path, root, 8)
    assert (plan.start, [one.number for one in plan.trained]) == (4, [5, 6, 7])
    plan = plan_replay(tmp_path, root, 2)
    assert (plan.start, [one.number for one in plan.trained]) == (0, [1])
    assert plan_replay(tmp_path, root, 1).trained == ()


def test_a_replay_says_what_was_changed_after_a_step_that_it_computes(tmp_path: Path) -> None:
    written(tmp_path, {number: (number - 1, number - 1) for number in range(1, 10)})
    changed = {8: Changed(("spec.training.recompute",))}
    records = [
        StepRecord(n, 1, 0.0, 0.1, {"rollout": 0.1}, 0.0, 0.0, {}, changed=changed.get(n), index=n - 1)
        for n in range(1, 10)
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(one.to_json()) + "\n" for one in records))
    root = saved(tmp_path, 2, 6, 7)
    (said,) = plan_replay(tmp_path, root, 6).changes
    assert said == "step 8: bits may differ from here on: spec.training.recompute changed at a resume"
    assert plan_replay(tmp_path, root, 8).changes == plan_replay(tmp_path, root, 9).changes == ()


def test_what_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text("")
    with pytest.raises(UserError, match=r"no journal; spec\.records\.journal: true keeps one"):
        plan_replay(tmp_path, Checkpoints(tmp_path / "checkpoints"), 3)
    written(tmp_path, {4: (3,), 5: (4,), 7: (5, 6)})
    with pytest.raises(UserError, match="no journal of step 6; there are those of steps 4 to 7"):
        plan_replay(tmp_path, Checkpoints(tmp_path / "checkpoints"), 6)
    with pytest.raises(UserError, match=r"weights 5 to 6; the newest .* step 4, and the journal lacks step 6"):
        plan_replay(tmp_path, saved(tmp_path, 4), 7)


def test_a_step_of_an_attempt_that_a_later_one_replaced_is_refused(tmp_path: Path) -> None:
    written(tmp_path, {number: (number - 1,) for number in range(1, 6)}, {4: 2})
    assert plan_replay(tmp_path, saved(tmp_path, 2), 3).start == 2
    written(tmp_path, {number: (number - 2, number - 1) for number in range(2, 6)}, {4: 2})
    with pytest.raises(UserError, match=r"step-000004.*of attempt 2; the run's step 4 is of attempt 1"):
        plan_replay(tmp_path, saved(tmp_path, 2), 5)


def test_a_span_is_asked_for_after_what_stood_before_it_and_up_to_where_it_was_cut(tmp_path: Path) -> None:
    write_journal(tmp_path, step_of(9, 6, 8), 1, WriteFailures())
    (one,) = read_journal(journal_files(tmp_path)[9]).groups
    asked = {version: asked_spans(one, PROMPT, version) for version in (6, 7, 8)}
    assert asked[7] == []
    seeds = [2**61 + 1, 2**61 + 2]
    for version, before, limit in ((6, [(), ()], 1), (8, [(6,), (7,)], None)):
        requests = [span.request for span in asked[version]]
        assert [request.seed for request in requests] == seeds
        assert [request.sampled_token_ids for request in requests] == before
        assert {request.max_tokens for request in requests} == {limit}
        assert {request.prompt_token_ids for request in requests} == {PROMPT.token_ids}
        recorded = [(span.recorded[0].tolist(), span.recorded[1].tolist()) for span in asked[version]]
        assert recorded == [([version + sample], [float(np.float32(-0.1))]) for sample in range(2)]
    with pytest.raises(UserError, match=r"spec\.data: prompt s/0 has other tokens than in the journal"):
        asked_spans(one, replace(PROMPT, token_ids=(5, 7)), 6)


def span(ids: list[int], log_probs: list[float]) -> tuple[Any, Any]:
    return np.array(ids, np.int64), np.array(log_probs, np.float32)


def test_the_first_other_token_is_named_and_what_follows_it_counts_for_nothing() -> None:
    found = Comparison()
    found.add("a", span([1, 2, 3], [-1.0, -2.0, -3.0]), span([1, 2, 3], [-1.0, -2.5, -3.0]))
    assert (found.tokens, found.equal, found.same_log_probs, found.largest) == (3, 3, 2, 0.5)
    assert found.whole, "the rounding of log-probabilities is none of a sample's"
    found.add("b", span([4, 5, 6], [-1.0, -1.0, -1.0]), span([4, 9, 6], [-1.0, -1.0, -1.0]))
    found.add("c", span([7, 8], [-1.0, -1.0]), span([7], [-1.0]))
    assert (found.tokens, found.equal, found.same_log_probs) == (8, 5, 4)
    assert found.first == "b, token 1: 5 in the journal, 9 now"
    assert not found.whole


def test_what_training_says_is_compared_where_the_record_says_it_too() -> None:
    found = Comparison()
    then = {"train/loss": 0.5, "train/kl_loss": None, "rollout/raw_reward": 1.0}
    found.add_metrics(3, then, {"train/loss": 0.5, "train/kl_loss": 0.0, "train/new": 1.0, "rollout/raw_reward": 2.0})
    assert (found.metrics, found.other_metrics) == (1, [])
    found.add_metrics(4, then, {"train/loss": 0.25})
    assert found.other_metrics == ["step 4 train/loss: 0.5 then, 0.25 now"]
    assert not found.whole
