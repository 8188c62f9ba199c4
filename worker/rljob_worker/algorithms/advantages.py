"""Advantages of grouped samples."""

from __future__ import annotations

from torch import Tensor

STD_EPSILON = 1e-6
"""Added to the standard deviation (slime and verl: 1e-6; TRL adds 1e-4)."""


def zero_variance(rewards: Tensor) -> Tensor:
    """Mask of groups with equal rewards, which carry no signal (DAPO, arXiv 2503.14476 section 3.2, samples them away).

    Args:
        rewards: [P, G].

    Returns:
        [P] bool. A group with a non-finite reward is never among them.
    """
    return ((rewards == rewards[:, :1]) & rewards.isfinite()).all(dim=1)


def group_advantages(rewards: Tensor, normalize_by_std: bool) -> Tensor:
    """Reward relative to the prompt's other samples: A_ig = (r_ig - mean_i) / (std_i + 1e-6).

    GRPO, arXiv 2402.03300 section 4.1.2; without the division: Dr. GRPO, arXiv 2503.20783. The standard deviation is
    the unbiased one (n - 1), as in slime and verl; the biased one gives 6.9 % larger advantages for groups of 8.

    Args:
        rewards: [P, G] float32, G samples of each of P prompts.
        normalize_by_std: divide by the group's standard deviation.

    Returns:
        [P, G] float32. A group of equal rewards, a group of one included, gets exactly 0; non-finite rewards give NaN.

    Raises:
        ValueError: `rewards` is not two-dimensional.
    """
    if rewards.dim() != 2:
        raise ValueError(f"rewards: shape {tuple(rewards.shape)}; it must be [prompts, samples per prompt]")
    exact = rewards.double()
    advantages = exact - exact.mean(dim=1, keepdim=True)
    if normalize_by_std and rewards.shape[1] > 1:
        advantages = advantages / (exact.std(dim=1, keepdim=True, unbiased=True) + STD_EPSILON)
    # Equal rewards do not always average to themselves in floating point, and the epsilon would magnify that residue.
    return advantages.masked_fill(zero_variance(rewards).unsqueeze(1), 0.0).float()
