"""Result of an evaluation of the policy: mean reward and pass@k for each source."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_api.spec import EvaluationSpec


@dataclass(frozen=True, slots=True)
class EvaluatedPrompt:
    """The scores of one prompt's responses."""

    source: str
    scores: Sequence[float]
    truncated: int = 0
    """Number of them that were cut at the token limit."""


@dataclass(frozen=True, slots=True)
class HeldOutSettings:
    """Scoring of one data set of an evaluation."""

    max_prompts: int | None
    samples_per_prompt: int
    pass_at: Sequence[int]


def held_out_settings(evaluation: EvaluationSpec, source: str | None) -> HeldOutSettings:
    """Settings of the set of that name, and the evaluation's where it has none."""
    own = next((held_out for held_out in evaluation.sets or [] if held_out.name == source), None)
    return HeldOutSettings(
        (own and own.max_prompts) or evaluation.max_prompts,
        (own and own.samples_per_prompt) or evaluation.samples_per_prompt,
        (own and own.pass_at) or evaluation.pass_at,
    )


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k responses passes, when c of n did.

    1 - C(n - c, k) / C(n, k), equation 1 of arXiv 2107.03374. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def aggregate(prompts: Sequence[EvaluatedPrompt], evaluation: EvaluationSpec) -> dict[str, float]:
    """Metrics of an evaluation, by source, named as slime names them.

    `eval/<source>` (mean reward over all responses), `eval/<source>/truncated_ratio`, and `eval/<source>/pass@<k>`
    for each k of the set's `passAt` (mean over prompts; a response passes with a reward of at least `passThreshold`).
    """
    by_source: Mapping[str, list[EvaluatedPrompt]] = defaultdict(list)
    for prompt in prompts:
        by_source[prompt.source].append(prompt)
    metrics = {}
    for source, group in by_source.items():
        scores = [score for prompt in group for score in prompt.scores]
        metrics[f"eval/{source}"] = math.fsum(scores) / len(scores)
        metrics[f"eval/{source}/truncated_ratio"] = sum(prompt.truncated for prompt in group) / len(scores)
        for k in held_out_settings(evaluation, source).pass_at:
            estimates = [
                pass_at_k(len(p.scores), sum(score >= evaluation.pass_threshold for score in p.scores), k)
                for p in group
            ]
            metrics[f"eval/{source}/pass@{k}"] = math.fsum(estimates) / len(estimates)
    return metrics
