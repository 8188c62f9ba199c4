"""The `math` reward on pairs of response and label.

`math_pairs.jsonl` has them with the score that must be given and with the peers that give it: ROLL at 8eb27cc2, verl at
b178a3cd5 (math_verify, prime_math, math_reward), TRL at f2cd57710, slime at 624b824a8 (math, deepscaler), with
math-verify 0.9.0. For ROLL and deepscaler, which look behind the thinking alone, a response without thinking was given
an empty one; TRL was given the label in dollars. Pairs without `peers_right` were not tried with them.
"""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest
from support.clocks import work

from rljob_worker.rewards.answers.expression import parse
from rljob_worker.rewards.answers.final import final_answer
from rljob_worker.rewards.answers.values import Budget, equal
from rljob_worker.rewards.math_reward import math, read_label

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "math_pairs.jsonl").read_text().splitlines()]
SECONDS = 1.0


def judged(response: str, label: str) -> tuple[float | str, float]:
    """The score, or what was raised, and the processor's seconds."""
    with work() as taken:
        try:
            score: float | str = math(response, label)
        except Exception as error:
            score = f"{type(error).__name__}: {error}"
    return score, taken.seconds


def test_every_pair_is_judged_right_and_soon() -> None:
    assert len(PAIRS) > 1000
    wrong = []
    for pair in PAIRS:
        score, seconds = judged(pair["response"], pair["label"])
        if score != pair["right"] or seconds > SECONDS:
            wrong.append((pair["kind"], pair["response"], pair["label"], pair["right"], score, seconds))
    assert not wrong


_PIECES = r"\ { } _ ^ ! | ( ) [ ] $ % , ; \frac \sqrt \text{ \begin{cases} \end{cases} \pm \cup \\ U & ° ' ① 𝟕"
PIECES = [*_PIECES.split(), "\x00"]
MUTANTS = 1500


def mutated(text: str, draws: random.Random) -> str:
    for _ in range(draws.randint(1, 4)):
        at = draws.randint(0, len(text))
        if draws.random() < 0.5:
            text = text[:at] + draws.choice(PIECES) + text[at:]
        else:
            text = text[:at] + text[at + draws.randint(1, 5) :]
    return text


def test_no_mutant_of_an_answer_raises() -> None:
    draws = random.Random(43)
    for _ in range(MUTANTS):
        pair = draws.choice(PAIRS)
        answer = mutated(pair["label"], draws)
        try:
            assert math(f"\\boxed{{{answer}}}", pair["label"]) in (0.0, 1.0)
        except Exception as error:
            raise AssertionError((answer, pair["label"])) from error


ANSWERS = {
    "towers": r"9^{9^{9^{9}}}", "tens": r"10^{10^{10^{10}}}", "twos": r"2^{2^{2^{2^{2^{2}}}}}",
    "e": r"e^{e^{e^{e^{e}}}}",
    "factorial": "1000000000!", "factorials": "((((10^9)!)!)!)!", "binomial": r"\binom{1000000}{500000}",
    "braces": "{" * 400 + "43" + "}" * 400, "brackets": "(" * 300 + "1" + ")" * 300, "signs": "-" * 500 + "42",
    "fractions": r"\frac{1}{" * 60 + "2" + "}" * 60, "roots": r"\sqrt{" * 80 + "2" + "}" * 80, "sum": "x+" * 1500 + "x",
    "list": "1," * 1500 + "1", "digits": "9" * 3000, "sine": r"\sin(10^{10^{9}})", "zero": r"\frac{0}{0}",
    "by 0": "1/0",
    "infinities": r"\infty-\infty", "log 0": r"\log 0", "tangent": r"\tan\frac{\pi}{2}", "signs both": r"\pm 1" * 20,
    "exponent": "1e99999", "product": "(x+1)" * 200, "divisions": "1/" * 500 + "2", "letters": "a" * 3000,
    "matrix": r"\begin{pmatrix}" + "1&" * 900 + r"1\end{pmatrix}", "intervals": r"(1,2)\cup" * 200 + "(1,2)",
    "equals": "x=" * 900 + "1", "less": "1<" * 900 + "x", "text": r"\text{a" * 300 + "}" * 300, "units": "1 m " * 700,
    "colons": "1:" * 900 + "1", "spaces": "7" + " " * 3900, "power of x": "x^{10^{20}}", "percent": "%" * 3000,
    "degrees": r"\deg" * 900, "money": "$" * 3001 + "1",
    "commas": "1,000" * 700, "symbols": r"\alpha\beta" * 300, "dots": "0." + "3" * 1900 + "...",
    "or": "1 or " * 700 + "1", "marks": "7" + "!" * 550, "marks behind a power": "x^2" + "!" * 550,
    "degrees behind": "7" + r"\deg" * 550, "quotients": "a/b" * 1300, "spaces in text": r"\text{" + " " * 3900 + "}",
    "ties in text": r"\text{" + "~" * 3900 + "}",
}  # fmt: skip


@pytest.mark.parametrize(
    "label", ["42", "x+1", "(1,2)", r"\{1,2,3\}", "(-\\infty,1)\\cup(2,3)", "5 km/h", "9^{9^{9^{8}}}"]
)
def test_no_answer_takes_long_or_raises(label: str) -> None:
    wrong = []
    for name, answer in ANSWERS.items():
        score, seconds = judged(f"So \\boxed{{{answer}}}", label)
        if score != 0 or seconds > SECONDS:
            wrong.append((name, score, seconds))
    assert not wrong


RESPONSES = {
    "boxes": r"\boxed{7} " * 10_000 + r"\boxed{8}", "a": "a" * 100_000, "braces": "{" * 100_000,
    "dollars": "$" * 100_000,
    "open boxes": r"\boxed{" * 15_000, "phrases": "answer is " * 10_000, "unfinished": r"\boxed{7" + " " * 100_000,
    "commas": "1," * 50_000, "fractions": r"\frac{" * 20_000, "brackets": "(" * 100_000, "sevens": "7 " * 50_000,
    "points": ". " * 50_000, "lines": "\n" * 100_000, "tags": "<answer>" * 12_000, "stars": "**" * 50_000,
    "displays": r"\[" * 50_000, "bare boxes": r"\boxed" * 16_000, "question": "=7 " * 33_000 + "?",
    "thinking": "<think>7</think>" * 6000 + "<think>", "hashes": "####" * 25_000, "tokens": "<|" * 50_000,
    "backslashes": "\\" * 100_000, "formulas": "$x$ " * 25_000 + "$", "answers": "Answer:\n" * 12_000,
    "ends": "</s>" * 25_000, "letters behind": "the answer is $8$" + "a/" * 400 + "!",
}  # fmt: skip


@pytest.mark.parametrize("name", RESPONSES)
def test_no_response_takes_long_or_raises(name: str) -> None:
    score, seconds = judged(RESPONSES[name], "7")
    assert score == 0.0
    assert seconds < SECONDS


@pytest.mark.parametrize("response", ["word " * 20_000 + r"\boxed{7}", "$x$ " * 25_000 + "the answer is 7",
                                      "<think>" + "8 " * 50_000 + "</think><answer>7</answer>"])  # fmt: skip
def test_the_answer_of_a_long_response_is_found(response: str) -> None:
    score, seconds = judged(response, "7")
    assert score == 1.0
    assert seconds < SECONDS


def test_it_runs_in_any_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(math(r"\boxed{9^{9^{9}}}", r"9^{9^{9}}")))
    thread.start()
    thread.join(SECONDS * 20)
    assert scores == [1.0]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("", "no answer"), (" ", "no answer"), ("$$", "no answer"), ("...", "no answer"), (r"\boxed{}", "no answer"),
        (r"\frac{1}{", "braces"), ("1}", "braces"), (r"\boxed{7", "braces|not closed"),
        ('{"ground_truth": "7"}', "is a mapping, not the answer"), ("{'answer': 7}", "is a mapping"),
        ("nan", "as where a value is missing"), ("null", "missing"),
        ("7" * 5000, "longer than 4000"), ("\frac{1}{2}", r"which was \\f"), ("\boxed{7}", r"which was \\b"),
        ("7" * 70_000, "longer than 64000"),
    ],
)  # fmt: skip
def test_a_label_without_an_answer_is_named(label: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_label(label)


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("so 3+4\n#### 7", "7"), (r"Thus $x = \boxed{7}$.", "7"), ("$7$", "7"), (r"\$18.90", "18.90"), ("$5", "5"),
        ("-", None),
    ],
)  # fmt: skip
def test_labels_as_data_sets_write_them(label: str, answer: str | None) -> None:
    if answer is None:
        with pytest.raises(ValueError, match="no answer"):
            read_label(label)
    else:
        assert math(f"\\boxed{{{answer}}}", label) == 1.0
        assert math(f"\\boxed{{{answer}1}}", label) == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<think>\\boxed{1}</think> \\boxed{2}", "2"), ("\\boxed{1} \\boxed{2}", "2"),
        ("\\boxed{1}, \\boxed{2}", "1 , 2"),
        ("<think>\\boxed{1}", None), ("nothing at all was found here", None), ("\\boxed{1", None),
        ("5 of them came, then all left", None),
        ("<answer>3</answer>", "3"), ("Answer: 4", "4"), ("the answer is not 4", ""),
    ],
)  # fmt: skip
def test_the_last_answer_is_found(response: str, answer: str | None) -> None:
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    ("written", "label", "score"),
    [
        (r"5\\", "5", 1), ("无穷大", r"\infty", 1), ("负无穷", r"-\infty", 1), ("负无穷大", r"\infty", 0),
        ("无穷多个", "infinitely many", 1), ("无穷多", r"\infty", 0),
    ],
)  # fmt: skip
def test_a_line_break_at_the_end_and_infinity_in_chinese(written: str, label: str, score: int) -> None:
    assert math(f"\\boxed{{{written}}}", label) == score


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("0.333333", r"\frac{1}{3}", True), ("0.666667", r"\frac{2}{3}", True), ("0.666666", r"\frac{2}{3}", True),
        ("0.33333", r"\frac{1}{3}", False), ("0.666668", r"\frac{2}{3}", False), ("0.333334", r"\frac{1}{3}", False),
        ("0.123456", "0.123457", False), ("3.141593", r"\pi", True), ("-1.414214", r"-\sqrt{2}", True),
        ("1.414214", r"-\sqrt{2}", False), ("10^{100}+1", "10^{100}", False), ("1000000.1", "1000000", False),
        (r"\sqrt{x^2}", "x", False), (r"\sqrt{x^2}", "|x|", True), ("(-8)^{1/3}", "-2", True),
        (r"\frac{x^2-1}{x-1}", "x+1", True), ("x+y", "y+x", True), ("x", "y", False), (r"\sin x", r"\cos x", False),
    ],
)  # fmt: skip
def test_values(left: str, right: str, same: bool) -> None:
    assert equal(parse(left), parse(right), Budget()) is same
    assert equal(parse(right), parse(left), Budget()) is same
