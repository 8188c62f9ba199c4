"""Groups that are carried over: what is asked for, what is added, and what a checkpoint keeps of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.spec import RewardSpec
from rljob_worker.flow import Decision, Group
from rljob_worker.rollouts.batch import limit_metrics, partial_metrics, staleness_metrics, tail_metrics, train_batch
from rljob_worker.rollouts.step import Step
from rljob_worker.types import Generation, Prompt, RewardResult

PROMPT = Prompt("s/0", "s", "text", (5, 6), None, RewardSpec(name="match"))


def part(ids: list[int], reason: str = "", stop_text: str | None = None) -> Generation:
    return Generation(np.array(ids, np.int64), np.full(len(ids), -0.1, np.float32), reason, stop_text)


def begun(ordinal: int = 3, version: int = 4) -> Group:
    return Group.begun(ordinal, PROMPT, samples=2, seed=100, version=version)


def saved(one: Group) -> Group:
    """The group as a checkpoint returns it, once its prompt is drawn."""
    return replace(Group.from_json(json.loads(json.dumps(one.as_json()))), prompt_uid=one.prompt_uid)


def test_a_group_goes_on_where_it_was_with_its_own_seed() -> None:
    one = begun()
    assert [(i, r.seed, r.sampled_token_ids, r.group) for i, r in one.requests()] == [(0, 100, (), 3), (1, 101, (), 3)]
    assert len({id(request.prompt_token_ids) for _, request in one.requests()}) == 1, "sent once"
    one = one.extended({0: part([7, 8], "stop", "x")}, 4).extended({1: part([9])}, 4)
    assert not one.complete
    (sample, request), *others = one.requests()
    assert (sample, request.prompt_token_ids, request.sampled_token_ids, request.seed) == (1, (5, 6), (9,), 101)
    assert not others
    one = one.extended({1: part([], "length")}, 5)
    assert one.complete
    assert one.oldest_version == 4
    whole = [episode.generation for episode in one.episodes]
    assert [(g.token_ids.tolist(), g.finish_reason, g.stop_text) for g in whole] == [
        ([7, 8], "stop", "x"), ([9], "length", None)
    ]  # fmt: skip


def test_a_group_that_never_ran_is_as_old_as_the_step_that_lets_it() -> None:
    assert begun(version=4).at(6).oldest_version == 6
    assert begun(version=4).extended({0: part([1])}, 4).at(6).oldest_version == 4


def test_a_group_begins_anew_with_its_own_noise() -> None:
    one = begun().extended({0: part([7, 8], "stop")}, 4).extended({1: part([9])}, 4)
    one = replace(one, deferred_at=7)
    again = saved(one.anew())
    assert again == one.anew()
    assert (again.num_sampled, again.deferred_at, again.results) == (0, 7, ())
    assert again.requests() == begun().requests(), "other noise than the first time"
    assert again.at(9).oldest_version == 9
    assert "deferred_at" not in begun().as_json(), "checkpoints of partial rollout are others than before"


def test_metrics_count_what_will_be_sampled_again() -> None:
    done = begun().extended({0: part([1, 2, 3], "stop")}, 6).extended({1: part([5], "stop")}, 6)
    done = replace(done, results=(RewardResult(0.0),) * 2)
    scored = [replace(done, decision=decision) for decision in (Decision.TRAINED, Decision.SURPLUS)]
    late = begun(7).extended({0: part([1, 2])}, 6)
    waiting = [replace(begun(o), deferred_at=since) for o, since in ((5, 6), (7, 7), (8, None))]
    step = Step(7, 6, groups=scored, left=tuple(waiting), deferred=[late])
    assert tail_metrics(step) == {
        "rollout/long_step": 0.0,
        "rollout/waiting_groups": 2.0,
        "rollout/deferred_groups": 1.0,
        "rollout/deferred_tokens": 2.0,
        "rollout/surplus_groups": 1.0,
        "rollout/surplus_tokens": 4.0,
    }


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2**40), max_size=4), st.integers(0, 3)), min_size=1, max_size=4),
    st.floats(),
    st.none() | st.text(max_size=3),
)
def test_a_checkpoint_keeps_every_bit(parts: list[tuple[list[int], int]], score: float, error: str | None) -> None:
    one = begun(version=0)
    for ids, version in parts:
        one = one.extended({0: part(ids)}, version)
    assert saved(one) == one
    done = one.extended({0: part([1], "stop", "\n")}, 9).extended({1: part([], "length")}, 9)
    done = replace(done, results=(RewardResult(score, {"a": score / 3}, error), RewardResult(0.0)))
    again = saved(done)
    assert replace(again, results=()) == replace(done, results=())
    for mine, other in zip(again.results, done.results, strict=True):
        assert repr(mine) == repr(other), "NaN included, which is not equal to itself"


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_checkpoint_keeps_the_experts_of_what_is_finished(dtype: type) -> None:
    of_all = np.arange(4 * 3 * 2).reshape(4, 3, 2).astype(dtype)
    cut = replace(part([7, 8]), experts=of_all[:3])
    one = begun().extended({0: cut}, 4)
    assert one.episodes[0].experts is None, "its next reading tells those of all tokens"
    one = one.extended({0: replace(part([9], "stop"), experts=of_all)}, 5).extended({1: part([1])}, 5)
    document = one.as_json()
    again = Group.from_json(json.loads(json.dumps(document))).episodes
    assert again[1].experts is None
    assert again[0].experts is not None
    assert (again[0].experts.dtype, again[0].experts.tolist()) == (dtype, of_all.tolist())
    batch = train_batch([replace(one, episodes=one.episodes[:1])], np.ones(1, np.float32))
    assert batch.experts is not None
    assert batch.experts.tolist() == of_all.tolist()
    document["episodes"][0]["experts"]["dtype"] = "O"
    with pytest.raises(ValueError, match="not a group that was carried over: experts of type 'O'"):
        Group.from_json(document)


def test_a_group_that_was_too_old_has_its_noise_again_and_says_so_in_a_checkpoint() -> None:
    one = begun().extended({0: part([7, 8], "stop")}, 4).extended({1: part([9])}, 5)
    again = saved(one.sampled_again(7))
    assert again == one.sampled_again(7)
    assert (again.num_sampled, again.renewed, again.staleness(7)) == (0, True, 0)
    assert again.requests() == begun().requests(), "other noise than the first time"
    assert "renewed" not in one.as_json(), "an older version reads what it knows"


def test_experts_of_more_or_fewer_tokens_are_refused() -> None:
    """All but the last of the five have some."""
    for count in (3, 5):
        with pytest.raises(ValueError, match=f"sample 0 of prompt 3 has 5 tokens and experts of {count}"):
            begun().extended({0: replace(part([7, 8, 9], "stop"), experts=np.zeros((count, 1, 2), np.uint8))}, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ordinal": "x"}, "not a group that was carried over"),
        ({"deferred_at": "x"}, "not a group that was carried over"),
        ({"episodes": []}, "its episodes are"),
        ({"results": [{"score": 1.0, "parts": {}, "error": None}]}, "has 2 samples and 1 rewards"),
        ({"results": [{"points": 1.0}]}, "not a group that was carried over"),
    ],
)
def test_what_is_no_such_group_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Group.from_json(begun().as_json() | change)


def test_metrics_count_what_is_new_what_is_left_and_how_old_what_is_trained_on_is() -> None:
    done = (
        begun()
        .extended({0: part([1, 2, 3])}, 4)
        .extended({0: part([4], "stop")}, 6, {0: "a"})
        .extended({1: part([5], "stop")}, 5, {1: "b"})
    )
    left = begun(7).extended({0: part([1, 2])}, 5).extended({0: part([3, 3, 3])}, 6)
    step = Step(7, 6, left=(left,))
    scored = replace(done, results=(RewardResult(0.0),) * 2)
    step.take(scored, Decision.TRAINED, PROMPT)
    assert partial_metrics(step) == {
        "rollout/carried_groups": 1.0,
        "rollout/carried_tokens": 5.0,
        "rollout/generated_tokens": 4.0,
    }
    assert staleness_metrics(step) == {
        "rollout/staleness/mean": pytest.approx(7 / 5),
        "rollout/staleness/max": 2.0,
        "rollout/staleness/tokens_0": 1.0,
        "rollout/staleness/tokens_1": 1.0,
        "rollout/staleness/tokens_2": 3.0,
    }
    batch = train_batch([done], np.array([1, -1], np.float32))
    assert batch.versions.tolist() == [4, 4, 4, 6, 5]
    assert step.learned_lengths() == [4, 1]
    step.advantages = np.array([1, -1], np.float32)
    assert "masked" not in str(step.samples())
    assert not any(math.isnan(p) for p in batch.rollout_log_probs)


def test_tokens_that_are_too_old_stay_in_the_stream_and_out_of_the_loss() -> None:
    done = (
        begun()
        .extended({0: part([1, 2, 3])}, 4)
        .extended({0: part([4], "stop")}, 6, {0: "a"})
        .extended({1: part([5], "stop")}, 4, {1: "b"})
    )
    lost = begun(7).extended({0: part([1, 2])}, 3)
    step = Step(7, 6, discarded=[lost], oldest_trained=5, advantages=np.array([1, -1], np.float32))
    scored = replace(done, results=(RewardResult(0.0),) * 2)
    step.take(scored, Decision.TRAINED, PROMPT)
    assert limit_metrics(step) == {
        "rollout/masked_tokens": 4.0,
        "rollout/discarded_groups": 1.0,
        "rollout/discarded_tokens": 2.0,
    }
    assert step.learned_lengths() == [1, 0]
    assert staleness_metrics(step)["rollout/staleness/max"] == 0.0
    spans = [[span.get("masked", False) for span in sample["spans"]] for sample in step.samples()[0]]
    assert spans == [[True, False], [True]]
    batch = train_batch([done], step.advantages, step.oldest_trained)
    assert batch.lengths.tolist() == [6, 3], "the model reads them"
    assert batch.tokens.tolist() == [5, 6, 1, 2, 3, 4, 5, 6, 5]
    assert batch.sampled.tolist() == [False] * 5 + [True] + [False] * 3
    assert (batch.versions.tolist(), batch.advantages.tolist()) == ([6], [1.0])
    assert len(batch.rollout_log_probs) == 1
