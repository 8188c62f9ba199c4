"""The pool of groups: its prompts over real data, against a plain list, and the states of its groups."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import numpy as np
import pytest
from test_run_folder import job

from rljob_worker.data.dataset import PromptSource
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.errors import UserError
from rljob_worker.flow import Group, GroupPool
from rljob_worker.types import Generation, RewardResult


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("data") / "names.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "label": "x"}) + "\n" for i in range(7)))
    model = {"random": {"config": {"model_type": "qwen3"}}}
    spec = job(data={"path": str(path), "name": "ab"}, model=model).spec
    tokenizer = load_tokenizer(prepare_tokenizer(spec, path.parent / "tokenizer"))
    return lambda: PromptSource(spec, tokenizer)


@pytest.mark.parametrize("seed", range(20))
def test_each_prompt_is_closed_once_over_any_steps_and_restarts(make: Any, seed: int) -> None:
    chance = random.Random(seed)
    order = [prompt.uid for prompt in make().next_prompts(200)]
    pool = GroupPool(make())
    closed: list[int] = []
    saved = pool.saved.cursor
    for _ in range(12):
        drawn = [one for _ in range(chance.randint(1, 3)) for one in pool.draw(chance.randint(1, 5))]
        if chance.random() < 0.3:
            # The driver dies in the step: what it drew is drawn again, with the same numbers.
            pool = GroupPool(make())
            pool.restore(json.loads(json.dumps(saved)), ())
            before, drawn = drawn, pool.draw(len(drawn))
            assert [(n.ordinal, n.prompt.uid) for n in drawn] == [(n.ordinal, n.prompt.uid) for n in before]
        assert all(order[one.ordinal] == one.prompt.uid for one in drawn)
        fates = {one.ordinal: chance.choice("cfo") for one in drawn}
        pool.settle([o for o, fate in fates.items() if fate == "c"], [o for o, fate in fates.items() if fate == "f"])
        closed += [ordinal for ordinal, fate in fates.items() if fate != "o"]
        saved = pool.saved.cursor
        assert sorted(closed + pool.open_ordinals()) == list(range(pool.next_ordinal))
    assert len(set(closed)) == len(closed)


def test_a_cursor_without_a_ledger_is_of_a_version_that_trained_on_all_it_drew(make: Any) -> None:
    source = make()
    source.next_prompts(5)
    pool = GroupPool(make())
    pool.restore(source.state(), ())
    assert [one.ordinal for one in pool.draw(2)] == [5, 6]
    assert (pool.open_ordinals(), pool.next_ordinal) == ([5, 6], 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"next": 4}, "does not add up"),
        ({"next": 5, "consumed": 4}, "counts 5 prompts, but the data gave 3"),
        ({"prompts": {"1": "ab/0"}}, r"prompts \[2\] are open, but named are \[1\]"),
        ({"prompts": {"2": "ab/9"}}, "no prompt 'ab/9'"),
        ({"prompts": {"2": "other/0"}}, "no prompt 'other/0'"),
    ],
)
def test_a_ledger_that_does_not_add_up_is_refused(make: Any, change: dict[str, Any], message: str) -> None:
    pool = GroupPool(make())
    pool.draw(3)
    pool.settle([0, 1], [])
    state = json.loads(json.dumps(pool.saved.cursor))
    state["ledger"] |= change
    with pytest.raises(ValueError, match=message):
        GroupPool(make()).restore(state, ())


def test_other_data_is_the_users_error(make: Any) -> None:
    state = GroupPool(make()).saved.cursor
    state["sources"][0]["rows"] = 9
    with pytest.raises(UserError, match="9 rows then, 7 now"):
        GroupPool(make()).restore(state, ())


def test_a_step_cannot_close_what_it_did_not_draw(make: Any) -> None:
    pool = GroupPool(make())
    pool.draw(2)
    pool.settle([0], [])
    with pytest.raises(ValueError, match="prompt 0 is to be filtered, but was closed before"):
        pool.settle([], [0])


# --- groups ------------------------------------------------------------------------------------


def part(*ids: int, end: str = "stop") -> Generation:
    return Generation(np.array(ids, np.int64), np.full(len(ids), -0.1, np.float32), end)


def filled(make: Any, count: int = 3) -> GroupPool:
    pool = GroupPool(make())
    for ordinal, prompt in pool.draw(count):
        pool.put(prompt, Group.begun(ordinal, prompt, 2, 100 * ordinal, 0))
    return pool


def test_a_group_is_growing_then_scoring_then_ready(make: Any) -> None:
    pool = filled(make)
    assert pool.counts() == {"growing": 3, "scoring": 0, "ready": 0}
    pool.extend(1, {0: part(5)}, 0)
    assert not pool[1].complete
    grown = pool.extend(1, {1: part(6, 7)}, 0)
    assert (grown, grown.complete) == (pool[1], True)
    assert [one.ordinal for one in pool.unscored()] == [1]
    pool.scoring(1)
    assert (pool.unscored(), pool.counts()) == ([], {"growing": 2, "scoring": 1, "ready": 0})
    # In whichever order they come.
    pool.score(1, 1, RewardResult(0.5, {}))
    assert not pool[1].results
    pool.score(1, 0, RewardResult(0.25, {}))
    assert [one.score for one in pool[1].results] == [0.25, 0.5]
    assert pool.counts() == {"growing": 2, "scoring": 0, "ready": 1}
    assert pool.take(1).ordinal == 1
    assert [one.ordinal for one in pool.groups] == [0, 2]


def test_rewards_of_what_was_dropped_are_not_those_of_what_is_sampled_again(make: Any) -> None:
    pool = filled(make, 1)
    for sample in (0, 1):
        pool.extend(0, {sample: part(5)}, 0)
    pool.scoring(0)
    pool.score(0, 0, RewardResult(1.0, {}))
    pool.update([pool[0].sampled_again(3)])
    pool.score(0, 1, RewardResult(1.0, {}))
    for sample in (0, 1):
        pool.extend(0, {sample: part(6)}, 3)
    pool.scoring(0)
    pool.score(0, 0, RewardResult(1.0, {}))
    pool.score(0, 1, RewardResult(0.5, {}), renewed=True)
    assert not pool[0].results
    pool.score(0, 0, RewardResult(0.5, {}), renewed=True)
    assert [one.score for one in pool[0].results] == [0.5, 0.5]
    pool.take(0)
    pool.score(0, 0, RewardResult(1.0, {}), renewed=True)
    assert pool.groups == []


def test_groups_that_an_update_leaves_as_they_are_keep_their_rewards(make: Any) -> None:
    pool = filled(make, 1)
    for sample in (0, 1):
        pool.extend(0, {sample: part(5)}, 0)
    pool.scoring(0)
    pool.score(0, 0, RewardResult(0.5, {}))
    pool.update([one.at(4) for one in pool.groups])
    pool.score(0, 1, RewardResult(0.5, {}))
    assert len(pool[0].results) == 2


def test_prompts_with_a_group_are_not_drawn_again_and_those_without_come_first(make: Any) -> None:
    pool = filled(make)
    pool.take(0)
    pool.take(1)
    assert [one.ordinal for one in pool.draw(1)] == [3]
    pool.settle([0], [])
    # Of 1 and 3 there is no group; 2 goes on.
    assert [one.ordinal for one in pool.saved.groups] == [2]
    assert [one.ordinal for one in pool.draw(3)] == [1, 3, 4]
    pool.update(())
    assert [one.ordinal for one in pool.draw(2)] == [2, 5]


def test_what_was_saved_goes_on_whatever_the_running_step_does(make: Any) -> None:
    pool = filled(make)
    pool.extend(2, {0: part(5, 6, end="")}, 0)
    pool.take(0)
    pool.settle([0], [])
    saved = pool.saved
    pool.extend(1, {0: part(9)}, 1)
    pool.take(2)
    pool.draw(2)
    assert pool.saved is saved
    again = GroupPool(make())
    groups = [Group.from_json(json.loads(json.dumps(one.as_json()))) for one in saved.groups]
    again.restore(json.loads(json.dumps(saved.cursor)), groups)
    assert again.groups == list(saved.groups)
    assert [one.prompt_uid for one in again.groups] == [again.prompt(ordinal).uid for ordinal in (1, 2)]
    assert again.saved == saved
    assert [one.ordinal for one in again.draw(1)] == [3]


def test_texts_go_with_their_tokens(make: Any) -> None:
    pool = filled(make, 1)
    pool.extend(0, {1: part(5)}, 0, {1: "five"})
    assert [one.text for one in pool[0].episodes] == [None, "five"]
    assert [one.text for one in pool[0].anew().episodes] == [None, None]
    assert "five" not in json.dumps(pool[0].as_json())


def test_samples_of_a_group_grow_in_two_threads(make: Any) -> None:
    pool = filled(make, 7)

    def grow(sample: int) -> None:
        for ordinal in range(7):
            for token in range(20):
                pool.extend(ordinal, {sample: part(token, end="" if token < 19 else "stop")}, 0)

    threads = [threading.Thread(target=grow, args=(sample,)) for sample in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.lengths for one in pool.unscored()] == [[20, 20]] * 7


def test_a_group_that_is_given_back_is_drawn_again(make: Any) -> None:
    pool = filled(make)
    uid = pool.prompt(1).uid
    pool.give_back(1)
    assert 1 not in pool
    assert 2 in pool
    assert [(one.ordinal, one.prompt.uid) for one in pool.draw(1)] == [(1, uid)]
    # One whose environments never began had no group.
    pool.give_back(1)
    assert [one.ordinal for one in pool.draw(2)] == [1, 3]
