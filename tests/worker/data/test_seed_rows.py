"""Rows that are seeds of an environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.spec import RLJobSpec, SeedRows
from rljob_worker.data.dataset import PromptSource, load_evaluation_prompts
from rljob_worker.data.seeds import SeededRows
from rljob_worker.data.sources import load_sources
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.errors import UserError

LAKE: dict[str, Any] = {"seeds": {"first": 100, "count": 9}, "environment": {"name": "FrozenLake"}}
SPOKEN = ["_ O P G", "Left Right", "_ _"]
MakeSpec = Callable[..., RLJobSpec]


def source(spec: RLJobSpec, folder: Path) -> PromptSource:
    return PromptSource(spec, load_tokenizer(prepare_tokenizer(spec, folder, SPOKEN)), max_prompt_tokens=4)


@given(first=st.integers(0, 2**62), count=st.integers(1, 10**7), data=st.data())
@settings(deadline=None)
def test_a_row_is_the_first_seed_and_its_number(first: int, count: int, data: st.DataObject) -> None:
    rows = SeededRows(SeedRows.model_validate({"first": first, "count": count}))
    row = data.draw(st.integers(0, count - 1))
    assert len(rows) == count
    assert rows[row] == rows[row - count] == {"seed": first + row}
    assert rows[row : row + 2] == [{"seed": first + one} for one in range(row, min(row + 2, count))]
    for outside in (count, -count - 1):
        with pytest.raises(IndexError):
            rows[outside]


def test_prompts_name_their_environment_and_its_seed_and_have_no_tokens_yet(
    make_spec: MakeSpec, tmp_path: Path
) -> None:
    spec = make_spec(LAKE)
    prompts = source(spec, tmp_path).next_prompts(20)
    assert sorted(prompt.seed for prompt in prompts[:9]) == list(range(100, 109))
    for prompt in prompts:
        assert prompt.uid == f"FrozenLake/{prompt.seed - 100}"
        assert (prompt.environment, prompt.text, prompt.token_ids, prompt.label) == ("spec.data", "", (), None)
        assert prompt.metadata == {"seed": prompt.seed}


@given(n=st.integers(0, 30), more=st.integers(1, 20))
@settings(deadline=None, max_examples=20)
def test_a_cursor_goes_on_with_the_seeds_that_would_have_come(
    tmp_path_factory: pytest.TempPathFactory, n: int, more: int
) -> None:
    spec = RLJobSpec.model_validate(
        {
            **{"steps": 1, "model": {"random": {"config": {"model_type": "qwen3"}}}, "reward": {"name": "environment"}},
            "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 2, "maxResponseTokens": 8},
            "data": LAKE,
        }
    )
    tokenizer = load_tokenizer(prepare_tokenizer(spec, tmp_path_factory.mktemp("tokenizer"), SPOKEN))
    whole = PromptSource(spec, tokenizer).next_prompts(n + more)
    first = PromptSource(spec, tokenizer)
    first.next_prompts(n)
    second = PromptSource(spec, tokenizer)
    second.restore(first.state())
    assert second.next_prompts(more) == whole[n:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": {"first": 101, "count": 9}}, "changed since the data cursor was saved"),
        ({"environment": {"name": "FrozenLake", "args": {"size": 5}}}, "changed since the data cursor was saved"),
        ({"environment": {"name": "FrozenLake", "stepSeconds": 9}}, None),
    ],
)
def test_other_seeds_or_another_environment_are_other_data(
    make_spec: MakeSpec, tmp_path: Path, change: dict[str, Any], message: str | None
) -> None:
    saved = source(make_spec(LAKE), tmp_path).state()
    now = source(make_spec(LAKE | change), tmp_path)
    if message is None:
        assert now.check(saved) == ()
        return
    with pytest.raises(UserError, match=message):
        now.check(saved)


@pytest.mark.parametrize("own_template", [False, True])
def test_keys_in_another_order_are_the_same_data(make_spec: MakeSpec, tmp_path: Path, own_template: bool) -> None:
    """The API server sorts keys; checkpoints of earlier versions have a fingerprint of them as they were given."""
    file = tmp_path / "chat.jinja"
    file.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    more = {"applyChatTemplate": True, "chat": {"templateFile": str(file)}} if own_template else {}

    def with_args(**args: Any) -> RLJobSpec:
        games = {"python": "game.py:Game", "args": args}
        return make_spec({**LAKE, "environment": games, **more})

    given = with_args(size=5, level={"b": 1, "a": [{"d": 2, "c": 3}]})
    ordered = with_args(level={"a": [{"c": 3, "d": 2}], "b": 1}, size=5)
    (loaded,), (in_order,) = load_sources(given), load_sources(ordered)
    assert loaded.fingerprint == in_order.fingerprint == in_order.earlier != loaded.earlier
    now = source(given, tmp_path)
    saved = source(ordered, tmp_path).state()
    assert now.check(saved) == ()
    saved["sources"][0]["fingerprint"] = loaded.earlier
    assert now.check(saved) == ()
    with pytest.raises(UserError, match="changed since the data cursor was saved"):
        source(with_args(size=6, level={"b": 1, "a": [{"d": 2, "c": 3}]}), tmp_path).check(saved)


def test_held_out_seeds_come_in_order(make_spec: MakeSpec, tmp_path: Path) -> None:
    sets = [{"name": "held-out", **LAKE, "seeds": {"first": 10**6, "count": 5}, "maxPrompts": 3}]
    spec = make_spec(LAKE, evaluation={"sets": sets})
    tokenizer = load_tokenizer(prepare_tokenizer(spec, tmp_path, SPOKEN))
    prompts = load_evaluation_prompts(spec, tokenizer, max_prompt_tokens=4)
    assert [prompt.seed for prompt in prompts] == [10**6, 10**6 + 1, 10**6 + 2]
    assert {(prompt.source, prompt.environment) for prompt in prompts} == {("held-out", "spec.evaluation.sets[0]")}


def test_a_trained_tokenizer_has_the_words_that_are_spoken(make_spec: MakeSpec, tmp_path: Path) -> None:
    chat = {"applyChatTemplate": True, "chat": {"system": "You walk"}}
    vocabulary = load_tokenizer(prepare_tokenizer(make_spec(LAKE | chat), tmp_path, SPOKEN)).get_vocab()
    assert {"_", "O", "P", "G", "Left", "Right", "You", "walk", "<|user|>"} <= set(vocabulary)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"python": "./games/my_game.py:Game"}, "games-my_game.py-Game"),
        ({"gymnasium": {"id": "ALE/Pong-v5"}}, "ALE-Pong-v5"),
    ],
)
def test_a_source_is_called_after_its_environment(
    make_spec: MakeSpec, tmp_path: Path, environment: dict[str, Any], name: str
) -> None:
    assert list(source(make_spec(LAKE | {"environment": environment}), tmp_path).rows) == [name]
