from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.clocks import work
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rljob_worker.errors import UserError
from rljob_worker.rewards.builtin import (
    check_args,
    exact,
    gsm8k,
    length_penalty,
    make_format,
    make_regex,
    overlong_penalty,
)
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
        ("match", {"pattern": "x"}, "reward.args.pattern: is no argument of the reward match; allowed: leave args out"),
        ("regex", {}, "reward.args.pattern: regex needs it; allowed: a string"),
        ("regex", {"pattern": "("}, "reward.args.pattern: is no regular expression: missing )"),
        ("regex", {"pattern": "x", "flags": 2}, "reward.args.flags: is no argument of the reward regex; allowed: pat"),
        ("regex", {"pattern": "x", "compare": "no"}, "reward.args.compare: has the wrong type or value; allowed: true"),
        ("overlong", {"limit": 8}, "reward.args.cache: overlong needs it"),
        ("overlong", {"cache": True}, "reward.args.cache: has the wrong type or value; allowed: a number of tokens"),
        ("format", {"tags": ["a", "a"]}, "reward.args.tags: has the wrong type or value; allowed: 1 to 8 different"),
    ],
)
def test_wrong_args_are_named(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_args(name, args)
    assert message in str(caught.value)


RAW = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72"


@pytest.mark.parametrize(
    ("response", "label", "strict", "flexible"),
    [
        ("24 in May.\n#### 72", RAW, 1, 1), ("#### 72", "72", 1, 1), ("#### 71\n#### 72", RAW, 1, 1),
        ("#### 72\n#### 71", RAW, 0, 0), ("it is 72", RAW, 0, 1), ("it is 72.", RAW, 0, 1), ("72 or 71", RAW, 0, 0),
        ("####72.00 dollars", RAW, 1, 1), ("#### $1,000", "1000", 1, 1), ("#### 1000", "x #### 1,000", 1, 1),
        ("#### -$5", "-5", 1, 1), ("#### \u2212", "-5", 0, 0), ("#### --5", "-5", 0, 0), ("#### 5", "-5", 0, 0),
        ("72 ####", RAW, 0, 0), ("", RAW, 0, 0), ("#### " + "7" * 100_000, RAW, 0, 0), ("#### .5", "0.5", 1, 1),
        ("\u0667\u0662", RAW, 0, 1), ("#### **72**", RAW, 0, 1), ("#### \\boxed{72}", RAW, 0, 1),
        ("#### +72", RAW, 1, 1),
        ("#### The answer is 72", RAW, 0, 1), ("####\n**$72** for 3 days", RAW, 0, 1), ("#### **71**", "72", 0, 0),
        ("72 #### none", RAW, 0, 0), ("#### 1", "1/2", 0, 0), ("#### 1/2", "1/2", 1, 1), ("#### 0.5", "1/2", 1, 1),
        ("#### \u22125", "-5", 1, 1), ("it is \u22125", "-5", 0, 1), ("#### 3 1/2", "3", 0, 0), ("#### 5e3", "5", 0, 0),
        ("#### 1 000", "1", 0, 0), ("#### 3 of 5", "3", 1, 1), ("#### 2^3", "2", 0, 0), ("#### 12 2", "12", 1, 1),
        ("#### 1/2", "1", 0, 0), ("#### 1/0", "1", 0, 0), ("#### -+72", RAW, 0, 1), ("#### `72`.", RAW, 0, 1),
    ],
)  # fmt: skip
def test_gsm8k(response: str, label: str, strict: float, flexible: float) -> None:
    assert (gsm8k(response, label), gsm8k(response, label, flexible=True)) == (strict, flexible)


@pytest.mark.parametrize(
    "label",
    [
        "",
        "seventy-two",
        "72 #### none",
        "#### " + "7" * 65,
        "3:30",
        "1-2",
        "x = 7",
        "7^2",
        "3 1/2",
        "1 000",
        "5e3",
        "72 " + "a" * 64 + "!",
        "72" + " a" * 64 + "!",
    ],
)
def test_gsm8k_needs_a_number_in_the_label(label: str) -> None:
    with pytest.raises(ValueError, match="the label has no number"):
        gsm8k("#### 72", label)


@pytest.mark.parametrize(
    ("args", "response", "score"),
    [
        ({}, "<think>a\nb</think>\n<answer>c</answer>\n", 1), ({}, " <think>a</think><answer>c</answer>", 1),
        ({}, "<think>a</think><answer>c</answer> more", 0), ({}, "so: <think>a</think><answer>c</answer>", 0),
        ({}, "<think>a</think> so <answer>c</answer>", 0), ({}, "<answer>c</answer><think>a</think>", 0),
        ({}, "<think> </think><answer>c</answer>", 0), ({}, "<think>a<think>b</think><answer>c</answer>", 0),
        ({}, "<think>a<answer>c</answer></think>", 0), ({}, "<think>a</think><answer>c", 0), ({}, "", 0),
        ({}, "<think>a</think><answer>c</answer><answer>d</answer>", 0), ({}, "</think>a<think><answer>c</answer>", 0),
        ({"opened": True}, "a</think><answer>c</answer>", 1), ({"opened": True}, "</think><answer>c</answer>", 0),
        ({"opened": True}, "<think>a</think><answer>c</answer>", 0),
        ({"tags": ["think"], "rest": True}, "<think>a</think>c", 1),
        ({"tags": ["think"], "rest": True}, "<think>a</think> ", 0), ({"tags": ["think"]}, "<think>a</think>c", 0),
    ],
)  # fmt: skip
def test_format(args: dict[str, Any], response: str, score: float) -> None:
    assert make_format(**args)(response) == score


def test_rewards_of_the_drivers_own_process_take_linear_time() -> None:
    hostile = ["<think>" * 20_000, "</think>" * 20_000, "#### " * 30_000, "1," * 80_000, "-" * 150_000, " " * 150_000]
    hostile += ["####" + " " * 150_000, "9" * 150_000, "<think>" + "\n" * 150_000, "a</think>" + " <" * 70_000]
    with work() as taken:
        for text in hostile:
            gsm8k(text, RAW)
            gsm8k(text, RAW, flexible=True)
            make_format()(text)
            make_format(opened=True, rest=True)(text)
    assert taken.seconds < 1


def test_length_and_overlong_penalties() -> None:
    assert [length_penalty(n, 100) for n in (0, 50, 100, 200)] == [0, -0.5, -1, -1]
    assert [length_penalty(n, 100, target=100) for n in (0, 75, 100, 150, 300)] == [-1, -0.25, 0, -0.5, -1]
    # DAPO's own setting, against equation 13 as it is printed.
    limit, cache = 20480, 4096
    for n in (0, 1, 16383, 16384, 16385, 18432, 20479, 20480, 20481, 30000):
        if n <= limit - cache:
            expected = 0.0
        elif n <= limit:
            expected = ((limit - cache) - n) / cache
        else:
            expected = -1.0
        assert overlong_penalty(n, limit, cache) == expected
    assert [overlong_penalty(n, 8, 8) for n in (0, 4, 8)] == [0, -0.5, -1]
