"""Names of the phases of a step, in the order of the loop."""

from __future__ import annotations

PHASES = (
    "rollout",
    "reward",
    "rollout_sleep",
    "wake_up",
    "ref_log_probs",
    "log_probs",
    "actor_train",
    "checkpoint",
    "rollout_wake_weights",
    "update_weights",
    "sleep",
    "rollout_wake_kv",
    "eval",
)

SWITCH_PHASES = ("rollout_sleep", "wake_up", "rollout_wake_weights", "update_weights", "sleep", "rollout_wake_kv")
"""Their sum is what a step pays for sharing devices."""
