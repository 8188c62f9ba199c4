"""Colours and styles of what people see, the same in pictures, in `rljob` and in `kubectl rljob`; names as rich has
them."""

from __future__ import annotations

PHASE_COLORS = {
    "rollout": "#1f77b4",
    "env_wait": "#17becf",
    "reward": "#9ecae1",
    "rollout_sleep": "#fdd0a2",
    "judge_wake": "#fee6ce",
    "judge": "#6baed6",
    "judge_sleep": "#fdbe85",
    "wake_up": "#fdae6b",
    "values": "#ccece6",
    "ref_log_probs": "#c7e9c0",
    "teacher_log_probs": "#a1d99b",
    "log_probs": "#74c476",
    "critic_train": "#41ae76",
    "actor_train": "#238b45",
    "checkpoint": "#8c6d31",
    "rollout_wake_weights": "#fd8d3c",
    "update_weights": "#d62728",
    "sleep": "#e6550d",
    "rollout_wake_kv": "#fc9272",
    "eval": "#9467bd",
    "batch_wait": "#9ecae1",
    "reward_wait": "#c6dbef",
    "admission_wait": "#deebf7",
    "other": "#525252",
}
"""Generation is blue, training green, handing the devices over orange to red."""

HEADING = "bold"
GOOD, WAITING, BAD, FAINT = "green", "yellow", "bold red", "dim"
"""Styles of texts: what is as it should be, what waits or should be looked at, what failed, what matters little."""
