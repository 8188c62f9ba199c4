"""SAPO: a smooth gate in the place of the clip (arXiv 2511.20347)."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.spec import AlgorithmSpec, SapoSpec
from rljob_worker.algorithms.finite import bounded_ratio, propagate_non_finite
from rljob_worker.algorithms.grpo import grpo_advantages
from rljob_worker.algorithms.losses import PolicyTokens
from rljob_worker.algorithms.registry import Algorithm, register


def soft_gate(tokens: PolicyTokens, spec: AlgorithmSpec) -> tuple[Tensor, Tensor]:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the advantage's sign (arXiv 2511.20347 eq. 5 and 6). A `TokenLoss`.

    At r = 1 the gradient is that of r A. Nothing is clipped.
    """
    gate_spec = spec.sapo or SapoSpec()
    # Of two numbers torch.where makes fp32, whatever the tokens are.
    tau = torch.full_like(tokens.log_ratio, gate_spec.tau_negative)
    tau = tau.masked_fill(tokens.advantages > 0, gate_spec.tau_positive)
    gate = torch.sigmoid(tau * (bounded_ratio(tokens.log_ratio) - 1)) * (4 / tau)
    loss = propagate_non_finite(-gate * tokens.advantages, tokens.log_ratio)
    return loss, torch.zeros_like(loss, dtype=torch.bool)


register(
    Algorithm(
        name="sapo",
        min_group_size=2,
        normalize_by_std=True,
        aggregation="SequenceMean",
        without_effect=("clip_low", "clip_high", "dual_clip"),
        advantages=grpo_advantages,
        token_loss=soft_gate,
    )
)
