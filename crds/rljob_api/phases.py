"""Names of the phases of a step, in the order of the loop."""

from __future__ import annotations

PHASES = (
    "rollout",
    "env_wait",
    "reward",
    "rollout_sleep",
    "judge_wake",
    "judge",
    "judge_sleep",
    "wake_up",
    "values",
    "ref_log_probs",
    "teacher_log_probs",
    "log_probs",
    "critic_train",
    "actor_train",
    "checkpoint",
    "rollout_wake_weights",
    "update_weights",
    "sleep",
    "rollout_wake_kv",
    "eval",
    "batch_wait",
    "reward_wait",
    "admission_wait",
)

WAITS = ("env_wait", "batch_wait", "reward_wait", "admission_wait")
"""In these a lane does nothing. `env_wait` is the part of a rollout in which no engine has a request and an episode is
in its environment. Where trainers and engines have devices of their own, the trainers wait for a batch, the engines for
rewards, and for leave to generate."""

TIMED_PHASES = tuple(name for name in PHASES if name not in ("env_wait", "batch_wait", "admission_wait"))
"""Phases that have deadlines of their own; a wait for the other lane ends by what that lane does, and one for
environments by their own deadlines."""

SWITCH_PHASES = (
    "rollout_sleep",
    "judge_wake",
    "judge_sleep",
    "wake_up",
    "rollout_wake_weights",
    "update_weights",
    "sleep",
    "rollout_wake_kv",
)
"""Their sum is what a step pays for sharing devices."""

TRAINER_LANE, ENGINE_LANE = "trainer", "engine"
"""The lanes of both, where engines work beside the trainers."""
LANES = (ENGINE_LANE,)
"""All that may run beside the trainers'."""
