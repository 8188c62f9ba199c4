"""The names of step metrics that a manifest may have, against those that the code writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from manifests import manifest

from rljob_api.step_metrics import is_step_metric, like_it
from rljob_api.validation import ManifestError, load_manifest

ROOT = Path(__file__).parents[2]
WRITERS = [*(ROOT / "worker" / "rljob_worker").rglob("*.py"), *(ROOT / "crds" / "rljob_api").rglob("*.py")]
FILLED = {
    "train/{}": ["train/loss"], "rollout/{}_groups": ["rollout/surplus_groups"], "perf/{}_time": ["perf/reward_time"],
    "rollout/{}_tokens": ["rollout/filtered_tokens"], "perf/{}_bubble": ["perf/engine_bubble", "perf/trainer_bubble"],
    "rollout/episodes/finish/{}": [f"rollout/episodes/finish/{of}" for of in ("environment", "turns", "failed")],
    "eval/{}": ["eval/a"], "eval/{}/pass@{}": ["eval/a/pass@4"], "eval/{}/truncated_ratio": ["eval/a/truncated_ratio"],
    "perf/env_{}_time/mean": ["perf/env_reset_time/mean"], "perf/env_{}_time/max": ["perf/env_step_time/max"],
    "perf/env_{}_time/p99": ["perf/env_step_time/p99"], "rollout/staleness/tokens_{}": ["rollout/staleness/tokens_2"],
    "train/train_rollout_logprob_abs_diff_age_{}": ["train/train_rollout_logprob_abs_diff_age_1"],
}  # fmt: skip
"""Names with what is put into them."""


def written() -> Iterator[tuple[str, str]]:
    """(name as the source has it, a metric's name) of all texts of the code that are like one."""
    for path in WRITERS:
        if "launchers" in path.parts or path.name in ("step_metrics.py", "panel_list.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            if re.fullmatch(r"(train|critic|rollout|perf|weights|eval)/[\w{}/@.]*[\w}]", text):
                yield from ((text, name) for name in FILLED.get(text, [text]))


def test_whatever_is_written_is_known() -> None:
    # The beginnings of f-strings, which are constants too, end with `_` or `/`.
    names = {name for text, name in written() if not text.endswith("_")}
    assert len(names) > 70
    assert [name for name in sorted(names) if not is_step_metric(name)] == []


@pytest.mark.parametrize("divergence", [None, "Sampled", "TopK"])
def test_losses_with_all_their_terms_have_known_metrics(divergence: str | None) -> None:
    import torch

    from rljob_api.spec import AlgorithmSpec
    from rljob_worker.algorithms import LossInputs, finish_metrics, policy_gradient_loss
    from rljob_worker.algorithms.mismatch import mismatch_by_age

    distill = {"teacher": {"path": "/t"}, "divergence": divergence, "rewardWeight": 1.0}
    with_teacher: dict[str, Any] = {"name": "distill", "distill": distill} if divergence else {}
    spec = AlgorithmSpec.model_validate(
        {
            "kl": {"coefficient": 0.1},
            "entropyCoefficient": 0.1,
            "tis": {"enabled": True},
            "offPolicyMask": {"delta": 0.1},
            **with_teacher,
        }
    )
    values = torch.zeros(4, requires_grad=True)
    mask = torch.ones(4, dtype=torch.bool)
    inputs = LossInputs(
        log_probs=values, advantages=torch.ones(4), mask=mask, weights=torch.ones(4), old_log_probs=torch.zeros(4),
        rollout_log_probs=torch.zeros(4), reference_log_probs=torch.zeros(4), entropy=values + 1,
        sequences=torch.zeros(4, dtype=torch.int64), teacher_log_probs=torch.zeros(4), divergence=values + 1,
    )  # fmt: skip
    _, metrics = policy_gradient_loss(inputs, spec)
    metrics |= mismatch_by_age(torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=torch.int64), 2)
    found = finish_metrics({name: float(value) for name, value in metrics.items()})
    assert len(found) > 10
    assert ("train/teacher_kl" in found) == (divergence is not None)
    assert [name for name in found if not is_step_metric(name)] == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["earlyStop={metric: rollout/raw_rewrd}"],
            "spec.earlyStop.metric: .*no metric of a step .*rollout/raw_reward",
        ),
        (["earlyStop={metric: reward}"], "spec.earlyStop.metric: .*no metric of a step record; allowed: rollout/"),
        (["earlyStop={metric: loss}"], "spec.earlyStop.metric: .*; allowed: .*train/loss"),
        (["checkpoint.keepBest={metric: train/los}"], "spec.checkpoint.keepBest.metric: .*train/loss"),
        (["earlyStop={metric: rollout/raw_reward, afterStep: 3000}"], "spec.earlyStop.afterStep: .* 0 to 2999"),
        (
            ["evaluation={sets: [{name: a, path: /a.jsonl}]}", "earlyStop={metric: eval/b}"],
            "spec.earlyStop.metric: .*of no set of the evaluation; allowed: eval/a",
        ),
        (
            ["evaluation={sets: [{name: a, path: /a.jsonl}]}", "earlyStop={metric: eval/a/pass@4}"],
            "spec.earlyStop.metric: .*not measured of this set; allowed: eval/a, eval/a/truncated_ratio, eval/a/pass@1",
        ),
    ],
)
def test_a_metric_that_no_record_has_is_refused(settings: list[str], said: str) -> None:
    with pytest.raises(ManifestError, match=said):
        load_manifest(manifest(*settings))


@pytest.mark.parametrize(
    "settings",
    [
        ["earlyStop={metric: rollout/reward_parts/my part}"],
        ["earlyStop={metric: perf/actor_train_time, mode: Min}"],
        ["evaluation={sets: [{name: a, path: /a.jsonl, passAt: [2], samplesPerPrompt: 2}], temperature: 1.0}",
         "earlyStop={metric: eval/a/pass@2}"],
        ["evaluation={data: {path: /a.jsonl}}", "earlyStop={metric: eval/whatever/it.is}"],
    ],
)  # fmt: skip
def test_what_may_be_measured_is_taken(settings: list[str]) -> None:
    assert load_manifest(manifest(*settings))


def test_what_is_near_is_offered() -> None:
    assert like_it("train/gradnorm")[0] == "train/grad_norm"
    assert like_it("response_tokens") == ["rollout/response_tokens"]
    assert like_it("nothing-like-it") == []
