"""The ledger of prompts over real data, against a plain list."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from test_run_folder import job

from rljob_worker.data.dataset import PromptSource
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.errors import UserError
from rljob_worker.rollouts.prompt_ledger import PromptLedger


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
    ledger = PromptLedger(make())
    closed: list[int] = []
    saved = ledger.state()
    for _ in range(12):
        drawn = [one for _ in range(chance.randint(1, 3)) for one in ledger.draw(chance.randint(1, 5))]
        if chance.random() < 0.3:
            # The driver dies in the step: what it drew is drawn again, with the same numbers.
            ledger = PromptLedger(make())
            ledger.restore(json.loads(json.dumps(saved)))
            before, drawn = drawn, ledger.draw(len(drawn))
            assert [(n.ordinal, n.prompt.uid) for n in drawn] == [(n.ordinal, n.prompt.uid) for n in before]
        assert all(order[one.ordinal] == one.prompt.uid for one in drawn)
        fates = {one.ordinal: chance.choice("cfo") for one in drawn}
        ledger.settle([o for o, fate in fates.items() if fate == "c"], [o for o, fate in fates.items() if fate == "f"])
        closed += [ordinal for ordinal, fate in fates.items() if fate != "o"]
        saved = ledger.state()
        assert sorted(closed + ledger.open_ordinals()) == list(range(ledger.next_ordinal))
    assert len(set(closed)) == len(closed)


def test_a_cursor_without_a_ledger_is_of_a_version_that_trained_on_all_it_drew(make: Any) -> None:
    source = make()
    source.next_prompts(5)
    ledger = PromptLedger(make())
    ledger.restore(source.state())
    assert [one.ordinal for one in ledger.draw(2)] == [5, 6]
    assert (ledger.open_ordinals(), ledger.next_ordinal) == ([5, 6], 7)


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
    ledger = PromptLedger(make())
    ledger.draw(3)
    ledger.settle([0, 1], [])
    state = ledger.state()
    state["ledger"] |= change
    with pytest.raises(ValueError, match=message):
        PromptLedger(make()).restore(state)


def test_other_data_is_the_users_error(make: Any) -> None:
    state = PromptLedger(make()).state()
    state["sources"][0]["rows"] = 9
    with pytest.raises(UserError, match="9 rows then, 7 now"):
        PromptLedger(make()).restore(state)


def test_a_step_cannot_close_what_it_did_not_draw(make: Any) -> None:
    ledger = PromptLedger(make())
    ledger.draw(2)
    ledger.settle([0], [])
    with pytest.raises(ValueError, match="prompt 0 is to be filtered, but was closed before"):
        ledger.settle([], [0])
