"""Importance sampling between the engine's and the trainer's probabilities, truncated or masked."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.spec import TisLevel, TisOutside, TisSpec
from rljob_worker.algorithms.finite import bounded_ratio, propagate_non_finite
from rljob_worker.algorithms.sequences import Sequences


def importance_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, spec: TisSpec, sequences: Sequences
) -> tuple[Tensor, Tensor]:
    """The factor of each token's policy loss, from d = log p_old - log p_rollout.

    The ratio is exp(d) of the token (`Token`), exp of the sum of d over its response (`Sequence`) or of the mean
    (`GeometricMean`). Outside [low, high] it is clamped (`Truncate`) or replaced by 0 (`Mask`).

    Token, Truncate: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"
    (fengyao.notion.site); slime `vanilla_tis_function`, whose bounds 0 and 2.0 are the defaults. Token, Mask: IcePop
    (Ling Team, ringtech.notion.site/icepop; slime `icepop_function`). Sequence: "sequence TIS" and, with Mask, TRL's
    `sequence_mask` (TRL `vllm_importance_sampling_mode`; Liu et al., "When speed kills stability"). GeometricMean:
    verl `seq_mean_k1`.

    Args:
        old_log_probs: [...] float32, the trainer's, of the policy that generated the tokens; 0 outside the mask.
        rollout_log_probs: [...] float32, the engine's; 0 outside the mask.
        spec: level, bounds, and what happens outside them.
        sequences: which tokens belong together.

    Returns:
        (weights, ratio), both [...] float32 without gradient; `ratio` is before the clamp. Where a log-probability is
        not finite the weight is NaN; so is that of all tokens of its response where the ratio is a response's.

    Raises:
        ValueError: `low` above `high`.
    """
    if spec.low > spec.high:
        raise ValueError(f"algorithm.tis.low: {spec.low} is above algorithm.tis.high {spec.high}")
    difference = (old_log_probs - rollout_log_probs).detach()
    if spec.level is TisLevel.TOKEN:
        ratio = torch.exp(difference)
    else:
        of_response = sequences.total if spec.level is TisLevel.SEQUENCE else sequences.mean
        difference = of_response(difference)
        ratio = bounded_ratio(difference)
    if spec.outside is TisOutside.TRUNCATE:
        weights = ratio.clamp(spec.low, spec.high)
    else:
        weights = torch.where((ratio >= spec.low) & (ratio <= spec.high), ratio, 0.0)
    return propagate_non_finite(weights, difference), ratio
