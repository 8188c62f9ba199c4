"""Policy-gradient algorithms as pure functions on tensors: no I/O, no state.

Every file of this folder is imported with it, so that an algorithm is registered by its file's being here.
"""

import importlib
import pkgutil

from rljob_worker.algorithms.advantages import group_advantages, zero_variance
from rljob_worker.algorithms.logits import response_log_probs
from rljob_worker.algorithms.losses import (
    MAX_METRICS,
    LossInputs,
    finish_metrics,
    policy_gradient_loss,
    token_weights,
)
from rljob_worker.algorithms.registry import Algorithm, get_algorithm, register, registered, step_advantages

__all__ = [
    "MAX_METRICS",
    "Algorithm",
    "LossInputs",
    "finish_metrics",
    "get_algorithm",
    "group_advantages",
    "policy_gradient_loss",
    "register",
    "registered",
    "response_log_probs",
    "step_advantages",
    "token_weights",
    "zero_variance",
]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
