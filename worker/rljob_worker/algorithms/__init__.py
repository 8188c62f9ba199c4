"""Policy-gradient algorithms as pure functions on tensors: no I/O, no state."""

from rljob_worker.algorithms.advantages import count_zero_variance_groups, group_advantages
from rljob_worker.algorithms.grpo import GRPO
from rljob_worker.algorithms.logits import response_log_probs
from rljob_worker.algorithms.losses import (
    MAX_METRICS,
    LossInputs,
    aggregate,
    finish_metrics,
    policy_gradient_loss,
    token_weights,
)
from rljob_worker.algorithms.spec import Algorithm, get_algorithm, register

__all__ = [
    "GRPO",
    "MAX_METRICS",
    "Algorithm",
    "LossInputs",
    "aggregate",
    "count_zero_variance_groups",
    "finish_metrics",
    "get_algorithm",
    "group_advantages",
    "policy_gradient_loss",
    "register",
    "response_log_probs",
    "token_weights",
]
