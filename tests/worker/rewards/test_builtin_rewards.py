from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rljob_worker.errors import UserError
from rljob_worker.rewards.builtin import check_args, exact, make_math, make_regex
from rljob_worker.rewards.match import Match


def word_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2, "b": 3, "c": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


@pytest.mark.parametrize(
    ("response", "score"),
    [([2, 3, 4, 2], 1.0), ([2, 3, 4, 2, 1], 1.0), ([2, 3, 4, 2, 3, 3, 3], 1.0), ([2, 3], 0.5), ([2, 4, 4, 3], 0.5),
     ([3, 4, 2], 0.0), ([], 0.0), ([1, 3, 1, 2], 0.5)],
)  # fmt: skip
def test_match_counts_places(response: list[int], score: float) -> None:
    assert Match(word_tokenizer())(np.array(response, dtype=np.int64), " a b c a\n") == score


def test_match_takes_the_label_with_or_without_a_space_before_it() -> None:
    tokenizer = Tokenizer(models.WordLevel({"7": 0, "Ġ7": 1, "Ġ8": 2, "8": 3}, unk_token="7"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    match = Match(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert match(np.array([0, 2]), "7 8") == match(np.array([1, 2]), "7 8") == 1.0
    assert match(np.array([3, 2]), "7 8") == 0.5


def test_match_needs_a_label_with_tokens() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        Match(word_tokenizer())(np.array([2]), " ")


def test_exact() -> None:
    assert exact(" 42\n", "42 ") == 1.0
    assert exact("42.", "42") == 0.0
    assert exact("<pad>42", "42") == 0.0


@pytest.mark.parametrize(
    ("args", "response", "label", "score"),
    [
        ({"pattern": r"answer: (\d+)"}, "answer: 1 ... answer: 42", "42", 1.0),
        ({"pattern": r"answer: (\d+)"}, "answer: 42 ... answer: 1", "42", 0.0),
        ({"pattern": r"answer: (\d+)"}, "42", "42", 0.0),
        ({"pattern": r"\d+"}, "it is 42", " 42", 1.0),
        ({"pattern": r"(a)|b"}, "b", "b", 0.0),
        ({"pattern": r"<think>.*</think>", "compare": False}, "<think>x</think>y", "42", 1.0),
        ({"pattern": r"\d+"}, "it is 7", None, 1.0),
        ({"pattern": r"\d+"}, "it is", None, 0.0),
    ],
)
def test_regex(args: dict[str, Any], response: str, label: str | None, score: float) -> None:
    assert make_regex(**args)(response, label) == score


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("match", {"pattern": "x"}, "reward.args: match takes none, but 'pattern' was given"),
        ("regex", {}, "reward.args.pattern: regex needs a pattern"),
        ("regex", {"pattern": "("}, "is not a regular expression: missing )"),
        ("regex", {"pattern": "x", "flags": 2}, "regex takes pattern and compare, not 'flags'"),
        ("regex", {"pattern": "x", "compare": "no"}, "true or false, not 'no'"),
    ],
)
def test_wrong_args_are_named(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_args(name, args)
    assert message in str(caught.value)


def test_math() -> None:
    score = make_math(30)
    for response, label in [
        ("the answer is $42$", "42"), ("so \\boxed{\\frac{84}{2}}", "42"), ("$x = 0.5$", "\\frac{1}{2}"),
        ("\\boxed{0.75}", "$\\frac{3}{4}$"), ("answer: 1,000", "1000"), ("\\boxed{2x+1}", "1 + 2x"),
        ("\\boxed{3}", "\\boxed{3}"),
    ]:  # fmt: skip
        assert score(response, label) == 1.0, (response, label)
    for response, label in [("$41$", "42"), ("", "42"), ("no idea", "42"), ("\\boxed{42", "43")]:
        assert score(response, label) == 0.0, (response, label)
    with pytest.raises(ValueError, match="no answer in the label ''"):
        score("1", "")


def test_math_counts_an_answer_that_takes_forever_as_wrong() -> None:
    assert make_math(6)("\\boxed{9^{9^{9^{9}}}}", "42") == 0.0
