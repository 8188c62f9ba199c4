from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.clocks import work
from transformers import PreTrainedTokenizerBase

from rljob_api.spec import RLJobSpec
from rljob_worker.data.dataset import PromptSource, load_evaluation_prompts
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.errors import UserError

MakeSpec = Callable[..., RLJobSpec]
Write = Callable[..., str]


def rows(n: int, prefix: str = "p", words: int = 2) -> list[dict[str, Any]]:
    return [{"prompt": " ".join([f"{prefix}{i}"] * words), "label": str(i)} for i in range(n)]


@pytest.fixture
def tokenizer_for(tmp_path: Path) -> Callable[[RLJobSpec], PreTrainedTokenizerBase]:
    return lambda spec: load_tokenizer(prepare_tokenizer(spec, tmp_path / "tokenizer"))


Tokenizer = Callable[[RLJobSpec], PreTrainedTokenizerBase]


def uids(source: PromptSource, n: int) -> list[str]:
    return [prompt.uid for prompt in source.next_prompts(n)]


def test_a_prompt_carries_what_the_row_has(make_spec: MakeSpec, write_jsonl: Write, tokenizer_for: Tokenizer) -> None:
    path = write_jsonl([{"q": "one two", "a": 3, "level": {"x": 1}}])
    spec = make_spec({"path": path, "promptKey": "q", "labelKey": "a", "name": "sums"})
    tokenizer = tokenizer_for(spec)
    (prompt,) = PromptSource(spec, tokenizer).next_prompts(1)
    assert (prompt.uid, prompt.source, prompt.text, prompt.label) == ("sums/0", "sums", "one two", "3")
    assert prompt.token_ids == tuple(tokenizer("one two")["input_ids"])
    assert prompt.metadata == {"level": {"x": 1}}
    assert prompt.reward == spec.reward


def test_an_epoch_is_a_permutation_and_the_next_another(
    make_spec: MakeSpec, write_jsonl: Write, tokenizer_for: Tokenizer
) -> None:
    spec = make_spec({"path": write_jsonl(rows(50))})
    tokenizer = tokenizer_for(spec)
    source = PromptSource(spec, tokenizer)
    first, second = uids(source, 50), uids(source, 50)
    assert sorted(first) == sorted(second) == sorted(f"data/{i}" for i in range(50))
    assert first != second != [f"data/{i}" for i in range(50)]
    assert uids(PromptSource(spec, tokenizer), 100) == first + second
    other = make_spec({"path": spec.data.path}, seed=99)
    assert uids(PromptSource(other, tokenizer), 50) != first


def test_without_shuffling_the_order_is_the_files(
    make_spec: MakeSpec, write_jsonl: Write, tokenizer_for: Tokenizer
) -> None:
    spec = make_spec({"path": write_jsonl(rows(3)), "shuffle": False})
    assert uids(PromptSource(spec, tokenizer_for(spec)), 7) == [f"data/{i % 3}" for i in range(7)]


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [1, 2, 4], [0.1, 0.2, 0.3, 5, 1, 1, 1, 1]])
def test_the_mix_follows_the_weights_all_the_time(
    weights: list[float], make_spec: MakeSpec, write_jsonl: Write, tokenizer_for: Tokenizer
) -> None:
    sources = [
        {"path": write_jsonl(rows(5 + i, f"s{i}x"), f"s{i}.jsonl"), "weight": weight}
        for i, weight in enumerate(weights)
    ]
    spec = make_spec({"sources": sources})
    drawn: Counter[str] = Counter()
    worst = 0.0
    for n, prompt in enumerate(PromptSource(spec, tokenizer_for(spec)).next_prompts(1000), start=1):
        drawn[prompt.source] += 1
        worst = max(worst, *(abs(drawn[f"s{i}"] - n * w / sum(weights)) for i, w in enumerate(weights)))
    assert worst < 1.5


def test_each_source_has_its_own_reward(make_spec: MakeSpec, write_jsonl: Write, tokenizer_for: Tokenizer) -> None:
    own = {"name": "regex", "args": {"pattern": "x"}}
    sources = [{"path": write_jsonl(rows(3), "a.jsonl")}, {"path": write_jsonl(rows(3), "b.jsonl"), "reward": own}]
    spec = make_spec({"sources": sources})
    rewards = {prompt.source: prompt.reward.name for prompt in PromptSource(spec, tokenizer_for(spec)).next_prompts(4)}
    assert rewards == {"a": "match", "b": "regex"}
    with pytest.raises(UserError, match=r"spec\.data\.sources\[0\]\.reward"):
        PromptSource(make_spec({"sources": sources}, reward=None), tokenizer_for(spec))


@pytest.fixture
def mixed(
    make_spec: MakeSpec, write_jsonl: Write, tokenizer_for: Tokenizer
) -> tuple[RLJobSpec, PreTrainedTokenizerBase]:
    long = rows(7, "a") + rows(4, "long", words=9) + rows(3, "c")
    sources = [
        {"path": write_jsonl(long, "a.jsonl"), "weight": 2},
        {"path": write_jsonl(rows(5, "b"), "b.jsonl"), "weight": 1.5},
        {"path": write_jsonl(rows(2, "d"), "d.jsonl"), "weight": 0.3},
    ]
    spec = make_spec({"sources": sources, "maxPromptTokens": 4})
    return spec, tokenizer_for(spec)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["go on", "restart", "rewind"])), max_size=8))
def test_any_interleaving_gives_the_same_stream(
    mixed: tuple[RLJobSpec, PreTrainedTokenizerBase], moves: list[tuple[int, str]]
) -> None:
    spec, tokenizer = mixed
    expected = PromptSource(spec, tokenizer).next_prompts(sum(n for n, _ in moves))
    source, got = PromptSource(spec, tokenizer), []
    for n, move in moves:
        state = json.loads(json.dumps(source.state()))
        got += source.next_prompts(n)
        after = source.state()
        if move == "restart":
            source = PromptSource(spec, tokenizer)
            source.restore(json.loads(json.dumps(after)))
        elif move == "rewind":
            source.restore(state)
            assert source.state() == state
            assert source.next_prompts(n) == got[len(got) - n :]
        assert source.state() == after
    assert got == expected


def test_long_prompts_are_skipped_and_each_is_counted_once(
    mixed: tuple[RLJobSpec, PreTrainedTokenizerBase], caplog: pytest.LogCaptureFixture
) -> None:
    spec, tokenizer = mixed
    source = PromptSource(spec, tokenizer)
    assert caplog.text == ""
    assert not any("long" in prompt.text for prompt in source.next_prompts(500))
    skipped = source.skipped()
    assert skipped.keys() == {"a"}
    assert (skipped["a"].count, skipped["a"].limit) == (4, 4)
    assert len(skipped["a"].examples) == 3
    assert all(uid in {f"a/{i}" for i in range(7, 11)} and tokens == 9 for uid, tokens in skipped["a"].examples)
    assert caplog.text.count("it is skipped") == 1
    assert "9 tokens, more than the limit of 4" in caplog.text
    again = PromptSource(spec, tokenizer)
    again.restore(source.state())
    assert again.skipped() == skipped


def test_the_smaller_limit_holds_and_it_is_inclusive(
    make_spec: MakeSpec, write_jsonl: Write, tokenizer_for: Tokenizer
) -> None:
    path = write_jsonl(rows(3, "a", 4) + rows(3, "b", 5) + rows(3, "c", 6))
    spec = make_spec({"path": path, "maxPromptTokens": 5})
    tokenizer = tokenizer_for(spec)

    def lengths(limit: int | None) -> set[int]:
        return {len(p.token_ids) for p in PromptSource(spec, tokenizer, max_prompt_tokens=limit).next_prompts(30)}

    assert lengths(None) == lengths(100) == {4, 5}
    assert lengths(4) == {4}
    with pytest.raises(UserError, match=r"spec\.data: all 9 prompts of .*data\.jsonl are longer than 3 tokens"):
        PromptSource(spec, tokenizer, max_prompt_tokens=3)


def test_one_source_without_a_fitting_prompt_is_an_error(
    make_spec: MakeSpec, write_jsonl: Write, tokenizer_for: Tokenizer
) -> None:
    sources = [{"path": write_jsonl(rows(3), "a.jsonl")}, {"path": write_jsonl(rows(3, "b", 9), "b.jsonl")}]
    spec = make_spec({"sources": sources, "maxPromptTokens": 4})
    with pytest.raises(UserError, match=r"spec\.data\.sources\[1\]: all 3 prompts"):
        PromptSource(spec, tokenizer_for(spec))


def test_changed_data_is_refused_by_name(make_spec: MakeSpec, write_jsonl: Write, tokenizer_for: Tokenizer) -> None:
    data = {"sources": [{"path": write_jsonl(rows(5), "a.jsonl")}, {"path": write_jsonl(rows(5), "b.jsonl")}]}
    spec = make_spec(data)
    tokenizer = tokenizer_for(spec)
    state = PromptSource(spec, tokenizer).state()

    def fails(message: str, **blocks: Any) -> None:
        with pytest.raises(UserError, match=message):
            PromptSource(make_spec(data, **blocks), tokenizer).restore(state)

    fails(r"spec\.seed is 5, .* saved with 1234", seed=5)
    write_jsonl(rows(6), "b.jsonl")
    fails(r"spec\.data\.sources\[1\]: the data of source 'b' .*5 rows then, 6 now")
    write_jsonl(rows(5)[::-1], "b.jsonl")
    fails(r"spec\.data\.sources\[1\]: the data of source 'b' .*other content")
    write_jsonl(rows(5), "b.jsonl")
    PromptSource(make_spec(data), tokenizer).restore(state)
    data["sources"][0] |= {"weight": 2.0}
    fails(r"spec\.data\.sources\[0\]\.weight: is 2\.0, .* saved with 1\.0")
    data["sources"][0] |= {"weight": 1.0, "weights": [{"from": 0, "value": 1.0}]}
    fails(r"spec\.data\.sources\[0\]\.weights: is \[\[0, 1\.0\]\], .* saved with None")
    data["sources"][0] |= {"name": "c"}
    fails("saved with the sources a, b, but the job has c, b")


def test_chat_prompts(make_spec: MakeSpec, write_jsonl: Write, tokenizer_for: Tokenizer) -> None:
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    path = write_jsonl([{"prompt": "hi", "label": "x"}, {"prompt": messages, "label": "x"}])
    spec = make_spec({"path": path, "applyChatTemplate": True, "shuffle": False})
    tokenizer = tokenizer_for(spec)
    tokenizer.bos_token = "x"
    plain, chat = PromptSource(spec, tokenizer).next_prompts(2)
    assert plain.text == "<|user|> hi <|assistant|>"
    assert chat.text == "<|system|> short <|user|> hi <|assistant|>"
    assert chat.token_ids == tuple(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )


def test_what_the_template_refuses_is_named(make_spec: MakeSpec, write_jsonl: Write, tokenizer_for: Tokenizer) -> None:
    spec = make_spec({"path": write_jsonl(rows(2)), "applyChatTemplate": True, "shuffle": False})
    tokenizer = tokenizer_for(spec)
    tokenizer.chat_template = "{{ raise_exception('no system prompt') }}"
    with pytest.raises(
        UserError, match=r"applyChatTemplate: the model's chat template: refuses .*row 0: .*no system prompt"
    ):
        PromptSource(spec, tokenizer).next_prompts(1)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"spec\.data\.applyChatTemplate: the model's tokenizer has no chat template"):
        PromptSource(spec, tokenizer)


def test_evaluation_prompts(
    make_spec: MakeSpec, write_jsonl: Write, tokenizer_for: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl([*rows(3, "a"), *rows(1, "long", 9), *rows(4, "b")], "test.jsonl")
    evaluation = {"data": {"path": path}, "maxPrompts": 5}
    spec = make_spec({"synthetic": {}}, evaluation=evaluation)
    tokenizer = tokenizer_for(spec)
    assert [p.uid for p in load_evaluation_prompts(spec, tokenizer)] == [f"test/{i}" for i in range(5)]
    fitting = load_evaluation_prompts(spec, tokenizer, max_prompt_tokens=4)
    assert [p.uid for p in fitting] == ["test/0", "test/1", "test/2", "test/4"]
    assert "1 prompt longer than 4 tokens was skipped, such as test/3 with 9" in caplog.text
    with pytest.raises(UserError, match=r"spec\.evaluation\.data: all 8 prompts"):
        load_evaluation_prompts(spec, tokenizer, max_prompt_tokens=1)
    assert load_evaluation_prompts(make_spec({"synthetic": {}}), tokenizer) == []
    sets = [{"name": "few", "path": path, "maxPrompts": 2}, {"name": "more", "path": path}]
    found = load_evaluation_prompts(make_spec({"synthetic": {}}, evaluation={"sets": sets, "maxPrompts": 3}), tokenizer)
    assert [p.uid for p in found] == ["few/0", "few/1", "more/0", "more/1", "more/2"]
    spec = make_spec({"synthetic": {}}, evaluation={"sets": sets})
    with pytest.raises(UserError, match=r"spec\.evaluation\.sets\[0\]: all 8 prompts"):
        load_evaluation_prompts(spec, tokenizer, max_prompt_tokens=1)


def test_a_large_file_is_ready_soon(make_spec: MakeSpec, write_jsonl: Write, tokenizer_for: Tokenizer) -> None:
    tokenizer = tokenizer_for(make_spec({"synthetic": {}}))
    path = write_jsonl([{"prompt": f"a b c {i} " * 30, "label": str(i)} for i in range(100_000)])
    spec = make_spec({"path": path})
    with work(time.process_time) as first:
        source = PromptSource(spec, tokenizer, max_prompt_tokens=1000)
        source.next_prompts(32)
    with work(time.process_time) as following:
        source.next_prompts(32)
    print(f"processor time to the first prompts {first.seconds:.2f} s, to the next {following.seconds:.3f} s")
    assert first.seconds < 8
    assert following.seconds < 1
