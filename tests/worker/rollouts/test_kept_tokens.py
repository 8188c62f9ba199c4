"""Choice of the tokens of a step that are kept, their texts, and how the trainers' numbers come to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_policies import begun
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rljob_api.spec import RecordsSpec
from rljob_worker.data.tokenizer import EOS, PAD, UNKNOWN, _train_bpe, _train_word
from rljob_worker.flow import Decision, Finish, Group
from rljob_worker.flow.turns import Opening, Turn
from rljob_worker.rollouts.kept_tokens import choose, reported, tokens_of, with_trainers
from rljob_worker.types import Generation, StepMetrics, TokenLogProbs

TEXT = "the cat sat on the mat é 日本 🎉"


@pytest.fixture(scope="module", params=["bpe", "words"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    train = _train_bpe if request.param == "bpe" else _train_word
    made = train([TEXT] * 3, [PAD, EOS, UNKNOWN], 60)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=EOS, clean_up_tokenization_spaces=False)


def group(ordinal: int, ids: list[list[int]], decision: Decision = Decision.TRAINED) -> Group:
    parts = {
        number: Generation(np.array(one), -np.arange(1, len(one) + 1, dtype=np.float32), "stop")
        for number, one in enumerate(ids)
    }
    return replace(begun(ordinal, samples=len(ids)).extended(parts, 0, {0: "text"}), decision=decision)


def chosen(groups: list[Group], most: int = 100, **records: Any) -> list[tuple[int, int, int, int | None]]:
    kept = choose(groups, RecordsSpec.model_validate(records), 6, most)
    return [(one.episode.ordinal, one.episode.sample, one.count, one.number) for one in kept]


def test_the_first_samples_are_kept_as_far_as_the_tokens_reach() -> None:
    groups = [
        group(1, [[5, 6], [7]]),
        group(2, [[5], [6, 7]], Decision.FILTERED),
        group(3, [[5, 6, 7, 8], [9]]),
    ]
    every = [(1, 0, 2, 0), (1, 1, 1, 1), (2, 0, 1, None), (2, 1, 2, None), (3, 0, 4, 2), (3, 1, 1, 3)]
    assert chosen(groups) == every
    assert chosen(groups, most=8) == [*every[:4], (3, 0, 2, 2)], "the last one is cut"
    assert chosen(groups, most=6) == every[:4]
    assert chosen(groups, trajectoriesPerStep=3) == every[:2], "whole groups"
    assert chosen(groups, trajectoriesPerStep=1) == every[:1]
    assert chosen(groups, trajectoriesEverySteps=3) == every
    assert chosen(groups, trajectoriesEverySteps=4) == chosen(groups, trajectoriesEverySteps=0) == []
    assert reported(choose(groups, RecordsSpec(), 6)) == 4
    assert reported(choose(groups[1:2], RecordsSpec(), 6)) == 0


def test_texts_are_what_each_token_adds(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = [*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id, *tokenizer("cat sat")["input_ids"]]
    ((one,),) = [tokens_of(choose([group(1, [ids])], RecordsSpec(), 1), tokenizer)]
    assert len(one.texts) == len(ids)
    assert all(one.texts), "each can be pointed at"
    words = "the cat sat on the mat é 日本"
    whole = "".join(one.texts)
    if "\ufffd" not in whole:
        assert whole == tokenizer.decode(ids)
    assert "the cat sat on the mat " in whole
    assert "é" in whole, "a character of two tokens is whole at the second"
    assert EOS in whole
    assert list(one.engine) == [-float(place) for place in range(1, len(ids) + 1)]
    assert words.split()[0] == one.texts[0]


def test_each_answer_of_an_episode_begins_its_own_text(tokenizer: PreTrainedTokenizerBase) -> None:
    cat, mat = (tokenizer(word)["input_ids"] for word in ("cat", "mat"))
    opened = replace(begun(1, samples=1), episodes=(replace(begun(1, samples=1).episodes[0], opening=Opening(0, "x")),))
    answer = {0: Generation(np.array(cat), np.full(len(cat), -1, np.float32), "stop")}
    first = opened.extended(answer, 0).episodes[0]
    again = first.observed(Turn("cat", "seen", 0.0, done=False), [4])
    both = again.with_sampled(Generation(np.array(mat), np.full(len(mat), -2, np.float32), "stop"), 1)
    (one,) = tokens_of(choose([replace(opened, episodes=(both,))], RecordsSpec(), 1), tokenizer)
    assert "".join(one.texts) == "catmat"
    assert list(one.engine) == [-1.0] * len(cat) + [-2.0] * len(mat)


def test_the_trainers_numbers_come_to_the_samples_that_they_trained_on(tokenizer: PreTrainedTokenizerBase) -> None:
    groups = [group(2, [[5], [6, 7]], Decision.FILTERED), group(3, [[5, 6, 7], [9]]), group(4, [[3, 4]])]
    kept = choose(groups, RecordsSpec(), 1, most=8)
    tokens = tokens_of(kept, tokenizer)
    of_rank = TokenLogProbs(np.array([2, 0]), np.array([2, 3]), np.array([-1.5, -9, -1, -2.25, -3], np.float32))
    joined = with_trainers(tokens, kept, [StepMetrics(), StepMetrics(log_probs=of_rank)])
    assert [one.differences for one in joined] == [None, None, [0.0, -0.25, 0.0], None, [-0.5]]
    assert [one.trainer for one in joined][2] == [-1.0, -2.25, -3.0]


def test_numbers_of_trainers_that_are_not_finite_are_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    """An update that was refused for that: the file stays one that can be read."""
    kept = choose([group(3, [[5, 6], [7]])], RecordsSpec(), 1)
    of_rank = TokenLogProbs(np.array([0, 1]), np.array([2, 1]), np.array([-1, np.nan, -1.5], np.float32))
    joined = with_trainers(tokens_of(kept, tokenizer), kept, [StepMetrics(log_probs=of_rank)])
    assert [one.differences for one in joined] == [None, [-0.5]]


def test_tokens_of_two_streams_are_in_the_order_of_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    def answer(ids: list[int], value: float) -> Generation:
        return Generation(np.array(ids), np.full(len(ids), value, np.float32), "stop")

    opened = replace(begun(1, samples=1).episodes[0], opening=Opening(0, "x"))
    episode = opened.with_sampled(answer([5, 6], -1), 0).called(Turn("", "", 0.0, done=False), [4], 1)
    episode = episode.with_sampled(answer([7], -2), 0).called(Turn("", "", 0.0, done=False, stream=1), [4], 0)
    episode = episode.with_sampled(answer([8], -3), 0).ended(Turn("", "", 0.0, done=True), Finish.ENVIRONMENT)
    agent = replace(begun(1, samples=1), episodes=(episode,), decision=Decision.TRAINED)
    kept = choose([agent, group(2, [[9]])], RecordsSpec(), 1)
    assert ([one.number for one in kept], reported(kept)) == ([0, 2], 3)
    tokens = tokens_of(kept, tokenizer)
    assert list(tokens[0].engine) == [-1.0, -1.0, -2.0, -3.0]
    of_rank = TokenLogProbs(np.array([0, 2]), np.array([3, 1]), np.array([-1, -1.5, -3.5, -2], np.float32))
    of_other = TokenLogProbs(np.array([1]), np.array([1]), np.array([-2], np.float32))
    joined = with_trainers(tokens, kept, [StepMetrics(log_probs=of_rank), StepMetrics(log_probs=of_other)])
    assert [one.differences for one in joined] == [[0.0, -0.5, 0.0, -0.5], [-1.0]]
    assert with_trainers(tokens, kept, [StepMetrics(log_probs=of_rank)])[0].differences is None


def test_a_sample_with_tokens_left_out_of_training_has_no_numbers_of_trainers(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """`onLimit: Mask`: which of its tokens the numbers are of is not said."""
    kept = choose([group(3, [[5, 6, 7], [8]])], RecordsSpec(), 1)
    of_rank = TokenLogProbs(np.array([0, 1]), np.array([2, 1]), np.array([-1, -2, -1.5], np.float32))
    joined = with_trainers(tokens_of(kept, tokenizer), kept, [StepMetrics(log_probs=of_rank)])
    assert [one.differences for one in joined] == [None, [-0.5]]
