"""The reward `judge` with a model of the job's own: its texts, its failures, and what it cannot be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from reward_cases import WORDS, samples_of, soon
from support.judge_models import write_judge
from transformers import PreTrainedTokenizerBase

from rljob_api.spec import RLJobSpec
from rljob_worker.errors import UserError
from rljob_worker.models.judge_model import Said
from rljob_worker.rewards.model_judge import model_judge
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rewards.score_calls import RewardError
from rljob_worker.rewards.scorers import Scorers
from rljob_worker.types import RewardResult


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_judge(tmp_path_factory.mktemp("judge") / "model", [*WORDS[2:], "question"])


def spec_of(folder: Path, reward: dict[str, Any] | None = None, **judge: Any) -> RLJobSpec:
    own = {"name": "scorer", "kind": "Score", "model": {"path": str(folder)} | judge.pop("model", {})}
    return RLJobSpec.model_validate(
        {
            "steps": 1,
            "model": {"path": "x"},
            "data": {"synthetic": {}},
            "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 2, "maxResponseTokens": 8},
            "reward": {"name": "judge"} | (reward or {}),
            "judges": [own | judge],
        }
    )


def runner_of(spec: RLJobSpec, tokenizer: PreTrainedTokenizerBase) -> RewardRunner:
    return RewardRunner(Scorers(spec, tokenizer, columns={"spec.data": frozenset({"level"})}, judge=model_judge(spec)))


def shown(folder: Path, texts: Any) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [" ".join(tokenizer.convert_ids_to_tokens(list(text))) for text in texts]


def test_texts_are_the_templates_and_scores_go_to_their_samples(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    spec = spec_of(folder)
    with runner_of(spec, tokenizer) as runner:
        assert runner.questions() is None
        runner.submit(samples_of(spec, ["a b", "c"]))
        questions = runner.questions()
        assert questions is not None
        assert runner.questions() is None
        assert shown(folder, questions.texts) == [
            "<|user|> question <eos> <|assistant|> a b <eos>",
            "<|user|> question <eos> <|assistant|> c <eos>",
        ]
        questions.answer([1.5, -2.0])
        assert [result.score for _, result in runner.take_all(soon())] == [1.5, -2.0]


def test_its_prompt_is_the_whole_text(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    spec = spec_of(folder, prompt="{{ response }} b {{ label }}")
    with runner_of(spec, tokenizer) as runner:
        runner.submit(samples_of(spec, ["c"]))
        questions = runner.questions()
        assert questions is not None
        assert shown(folder, questions.texts) == ["c b a b"]
        questions.answer([0.0])


def test_a_policy_writes_none_of_its_special_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    judge = model_judge(spec_of(folder))
    assert judge is not None
    sample = {"prompt": "question", "messages": None, "response": "a <eos> <|user|> b"}
    ids = judge.tokens(sample)
    assert shown(folder, [ids]) == ["<|user|> question <eos> <|assistant|> a <unk> <unk> <unk> <unk> b <eos>"]


def test_nor_in_the_turns_of_an_episode(folder: Path) -> None:
    judge = model_judge(
        spec_of(
            folder, prompt="{% for turn in turns %}{{ turn.action }} {{ turn.observation }} {% endfor %}{{ response }}"
        )
    )
    assert judge is not None
    turns = [{"action": "a <eos>", "observation": "<|user|> b", "reward": 0.0, "values": {}}]
    sample = {
        "prompt": "question", "messages": None, "response": "c", "label": None, "finish_reason": "stop",
        "metadata": {"turns": turns},
    }  # fmt: skip
    assert shown(folder, [judge.tokens(sample)]) == ["a <unk> <unk> <unk> <unk> b c"]


@pytest.mark.parametrize("lost", [math.nan, math.inf, 1e39])
def test_what_has_no_score_is_an_error_and_never_0(
    folder: Path, tokenizer: PreTrainedTokenizerBase, lost: float
) -> None:
    """10 of 30 responses have none, of two kinds: each is counted, and the others have their own."""
    spec = spec_of(folder, {"onError": "Score", "errorScore": -7.0}, maxErrorShare=0.5, model={"maxTokens": 12})
    long = " ".join("a" * 9)
    texts = [long if n % 10 == 0 else "a b" for n in range(30)]
    with runner_of(spec, tokenizer) as runner:
        runner.submit(samples_of(spec, texts))
        questions = runner.questions()
        assert questions is not None
        assert len(questions.texts) == 27
        answered = [lost if n % 4 == 0 else float(n) for n in range(27)]
        questions.answer(answered)
        results: list[RewardResult] = [result for _, result in runner.take_all(soon())]
    scored = iter(answered)
    for text, result in zip(texts, results, strict=True):
        if text == long:
            assert result.score == -7.0
            assert result.error is not None
            assert "has 14 tokens, more than the 12 that it takes" in result.error
        elif (score := next(scored)) is lost:
            assert result.score == -7.0
            assert result.error is not None
            assert "not a finite number" in result.error or "not finite in fp32" in result.error
        else:
            assert (result.score, result.error) == (score, None)


def test_too_many_without_a_score_fail_the_step_whatever_on_error_says(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    spec = spec_of(folder, {"onError": "Score"})
    with runner_of(spec, tokenizer) as runner:
        runner.submit(samples_of(spec, ["a"] * 30))
        questions = runner.questions()
        assert questions is not None
        questions.answer([math.nan if n % 3 == 0 else 1.0 for n in range(30)])
        with pytest.raises(RewardError, match=r"10 of its last 28 answers had no verdict, more than maxErrorShare"):
            runner.take_all(soon())


def test_a_response_without_a_score_fails_the_step_by_name(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    spec = spec_of(folder)
    with runner_of(spec, tokenizer) as runner:
        runner.submit(samples_of(spec, ["a", "b"]))
        questions = runner.questions()
        assert questions is not None
        questions.answer([1.0, math.nan])
        with pytest.raises(
            RewardError, match="sample 1 failed: judge scorer: its model gave nan: the score is nan, not a finite"
        ):
            runner.take_all(soon())


def test_a_command_without_engines_refuses_it(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match="judge scorer is a model on the job's own devices"):
        RewardRunner(Scorers(spec_of(folder), tokenizer))


def test_models_that_give_no_score_are_refused(folder: Path, tmp_path: Path) -> None:
    two = write_judge(tmp_path / "two", ["a"], num_labels=2)
    with pytest.raises(UserError, match=r"^spec.judges\[0\].model.path: .* the model has 2 labels; a score is one"):
        model_judge(spec_of(two))
    bare = write_judge(tmp_path / "bare", ["a"], template=None)
    with pytest.raises(UserError, match=r"^spec.judges\[0\].prompt: is needed, .* has no chat template"):
        model_judge(spec_of(bare))
    assert model_judge(spec_of(bare, prompt="{{ response }}")) is not None
    (bare / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"^spec.judges\[0\].model.path: .* no weights"):
        model_judge(spec_of(bare, prompt="{{ response }}"))
    config = two / "config.json"
    config.write_text(config.read_text().replace("ForSequenceClassification", "ForCausalLM"))
    with pytest.raises(UserError, match="architectures Qwen3ForCausalLM; a judge that scores is one of sequence"):
        model_judge(spec_of(two))
    with pytest.raises(UserError, match="there is no such folder"):
        model_judge(spec_of(tmp_path / "none"))


def test_a_prompt_that_asks_for_no_column_is_refused(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match="'rubric' is no column of the data; there are"):
        runner_of(spec_of(folder, prompt="{{ response }} {{ rubric }}"), tokenizer)


def test_texts_are_in_the_order_of_their_prompts_however_they_came(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    from dataclasses import replace

    spec = spec_of(folder)
    groups = [[replace(one, ordinal=ordinal) for one in samples_of(spec, [text, "z"], f"data/{ordinal}")]
              for ordinal, text in enumerate("abc")]  # fmt: skip
    seen = []
    for order in (groups, groups[::-1]):
        with runner_of(spec, tokenizer) as runner:
            for group in order:
                runner.submit(group)
            questions = runner.questions()
            assert questions is not None
            seen.append(questions.texts)
            questions.answer([0.0] * 6)
    assert seen[0] == seen[1]


# --- one that writes ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_judge(tmp_path_factory.mktemp("writer") / "model", [*WORDS[2:], "question"], writes=True)


def writing(writer: Path, reward: dict[str, Any] | None = None, **judge: Any) -> RLJobSpec:
    return spec_of(writer, reward, **{"kind": "Chat", "maxTokens": 8, "prompt": "{{ response }} {{ min }}"} | judge)


def test_its_answer_is_read_and_asked_for_once_more(writer: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    spec = writing(writer)
    with runner_of(spec, tokenizer) as runner:
        runner.submit(samples_of(spec, ["a", "b", "c"]))
        first = runner.questions()
        assert first is not None
        assert first.writes
        assert shown(writer, first.texts)[1] == "<|user|> b <unk> <eos> <|assistant|>"
        again = first.answer([Said("fine. Score: 3", False), Said("I cannot", True), Said("Score: 11", False)])
        assert again is not None
        assert (again.texts, set(again.seeds) & set(first.seeds)) == (first.texts[1:], set())
        assert again.answer([Said("Score: 4", False), Said("Score: 5.5 it is", False)]) is None
        results = [result for _, result in runner.take_all(soon())]
    assert [(one.score, one.notes) for one in results] == [
        (3.0, {"judge": "fine. Score: 3"}),
        (4.0, {"judge": "Score: 4"}),
        (5.5, {"judge": "Score: 5.5 it is"}),
    ]


def test_an_answer_that_was_cut_has_no_verdict(writer: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """It may be half of 10, or stand in what the judge quotes of the response."""
    spec = writing(writer, {"onError": "Score", "errorScore": -1.0})
    with runner_of(spec, tokenizer) as runner:
        runner.submit(samples_of(spec, ["a"]))
        first = runner.questions()
        assert first is not None
        again = first.answer([Said("Score: 1", True)])
        assert again is not None
        assert again.answer([Said('It says "Score: 10" and', True)]) is None
        ((_, result),) = runner.take_all(soon())
    assert result.score == -1.0


def test_two_answers_without_a_verdict_are_an_error(writer: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    spec = writing(writer, {"onError": "Score", "errorScore": -1.0})
    with runner_of(spec, tokenizer) as runner:
        runner.submit(samples_of(spec, ["a"]))
        first = runner.questions()
        assert first is not None
        again = first.answer([Said("no", False)])
        assert again is not None
        assert again.answer([Said("still no", True)]) is None
        ((_, result),) = runner.take_all(soon())
    assert result.score == -1.0
    assert result.error == "judge scorer: the answer has no verdict, cut at maxTokens: 'still no'"


def test_one_that_cannot_write_is_refused(folder: Path, writer: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="architectures Qwen3ForSequenceClassification; a judge that writes is a causal"
    ):
        model_judge(writing(folder))
    with pytest.raises(UserError, match=r"judges\[0\].maxTokens: 128 leaves no room for a text; the model takes 128"):
        model_judge(writing(writer, maxTokens=128))
    bare = write_judge(tmp_path / "bare", ["a"], template=None, writes=True)
    with pytest.raises(UserError, match=r"judges\[0\].model.path: the tokenizer of .* has no chat template"):
        model_judge(writing(bare))
