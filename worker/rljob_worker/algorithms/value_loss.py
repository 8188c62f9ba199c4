"""A critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """0.5 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) of each token; with clip 0: 0.5 (V - R)^2.

    PPO's clipped value loss (openai/baselines `ppo2`; TRL `PPOTrainer`, `cliprange_value`; verl `compute_value_loss`,
    `cliprange_value`).

    Args:
        values: [...] float32, differentiable.
        old_values: like them, from before the step's first update.
        returns: like them.
        clip: distance from the old value within which a change counts; 0: any.

    Returns:
        (loss, clipped), both like `values`: the loss, and whether the clip decided it (bool).
    """
    error = (values - returns).square()
    if clip == 0:
        return 0.5 * error, torch.zeros_like(error, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip, clip)
    bounded = (near - returns).square()
    return 0.5 * torch.maximum(error, bounded), bounded > error
