from __future__ import annotations

from itertools import combinations

import pytest

from rljob_api.spec import EvaluationSpec
from rljob_worker.data.evaluate import EvaluatedPrompt, HeldOutSettings, aggregate, held_out_settings, pass_at_k


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses_the_impossible(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


def test_large_n_does_not_overflow() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)


def test_sets_have_their_own_settings() -> None:
    evaluation = EvaluationSpec.model_validate(
        {
            "sets": [
                {"name": "many", "path": "a", "samplesPerPrompt": 4, "passAt": [4], "maxPrompts": 3},
                {"name": "one", "path": "b"},
            ],
            "samplesPerPrompt": 2,
            "maxPrompts": 9,
            "temperature": 1,
        }
    )
    assert held_out_settings(evaluation, "many") == HeldOutSettings(3, 4, [4])
    assert held_out_settings(evaluation, "one") == HeldOutSettings(9, 2, [1])
    scores = [EvaluatedPrompt("many", [1, 0, 0, 0]), EvaluatedPrompt("one", [1, 0])]
    assert aggregate(scores, evaluation) == {
        "eval/many": 0.25, "eval/many/truncated_ratio": 0, "eval/many/pass@4": 1,
        "eval/one": 0.5, "eval/one/truncated_ratio": 0, "eval/one/pass@1": 0.5,
    }  # fmt: skip


def test_aggregate_by_source() -> None:
    evaluation = EvaluationSpec.model_validate(
        {"data": {"path": "x.jsonl"}, "samplesPerPrompt": 2, "passAt": [1, 2], "passThreshold": 0.5}
    )
    prompts = [
        EvaluatedPrompt("easy", [1.0, 0.5]),
        EvaluatedPrompt("easy", [0.0, 0.5], truncated=1),
        EvaluatedPrompt("hard", [0.1, 0.2]),
    ]
    assert aggregate(prompts, evaluation) == pytest.approx(
        {
            "eval/easy": 0.5, "eval/easy/truncated_ratio": 0.25, "eval/easy/pass@1": 0.75, "eval/easy/pass@2": 1.0,
            "eval/hard": 0.15, "eval/hard/truncated_ratio": 0.0, "eval/hard/pass@1": 0.0, "eval/hard/pass@2": 0.0,
        }
    )  # fmt: skip
