"""GSPO: the ratio and its clip are of whole responses (arXiv 2507.18071)."""

from __future__ import annotations

from torch import Tensor

from rljob_api.spec import AlgorithmSpec
from rljob_worker.algorithms.grpo import grpo_advantages
from rljob_worker.algorithms.losses import PolicyTokens, clipped_policy_loss
from rljob_worker.algorithms.registry import Algorithm, register


def sequence_clip(tokens: PolicyTokens, spec: AlgorithmSpec) -> tuple[Tensor, Tensor]:
    """PPO's clip of s_t = sg[s] p_t / sg[p_t], where s = exp(mean over the response of log p_new - log p_old).

    GSPO-token, arXiv 2507.18071 eq. 14: its value is that of GSPO (eq. 5), and its gradient too where all tokens of a
    response have one advantage; where they differ, each token's counts for itself. A `TokenLoss`.
    """
    of_response = tokens.sequences.mean(tokens.log_ratio).detach()
    log_ratio = tokens.log_probs - tokens.log_probs.detach() + of_response
    return clipped_policy_loss(log_ratio, tokens.advantages, spec.clip_low, spec.clip_high, spec.dual_clip)


register(
    Algorithm(
        name="gspo",
        min_group_size=2,
        # arXiv 2507.18071 section 5.1: the ratio of a whole response, taken per token, hardly moves.
        clip_low=3e-4,
        clip_high=4e-4,
        normalize_by_std=True,
        aggregation="SequenceMean",
        without_effect=("sapo",),
        advantages=grpo_advantages,
        token_loss=sequence_clip,
    )
)
