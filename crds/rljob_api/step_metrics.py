"""Names that a step record's `metrics` can have: those that a manifest names are held against them."""

from __future__ import annotations

import difflib
import re

from rljob_api.phases import PHASES
from rljob_api.reward_parts import PREFIX

_GROUPS = ("carried", "deferred", "discarded", "filtered", "surplus")
STEP_METRICS = frozenset(
    {
        *(f"train/{name}" for name in ("loss", "pg_loss", "entropy_loss", "kl_loss", "ppo_kl", "grad_norm", "lr")),
        *(f"train/{name}" for name in ("pg_clipfrac", "tis", "tis_clipfrac", "off_policy_masked", "mismatch_kl")),
        *("train/train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff_max"),
        *("train/router_mismatch", "train/lora_change_lost", "train/teacher_kl"),
        *(f"critic/{name}" for name in ("value_loss", "value_clip_fraction", "value_mean", "return_mean")),
        *(f"critic/{name}" for name in ("explained_variance", "grad_norm", "lr")),
        *("rollout/raw_reward", "rollout/raw_reward_std", "rollout/raw_reward_min", "rollout/raw_reward_max"),
        *("rollout/rewards", "rollout/truncated_ratio", "rollout/response_tokens", "rollout/generated_tokens"),
        *(f"rollout/response_len/{of}" for of in ("mean", "median", "max", "min")),
        *("rollout/zero_std/count", "rollout/zero_std/ratio", "rollout/reward_parts_left_out"),
        *(f"rollout/{of}_{what}" for of in _GROUPS for what in ("groups", "tokens")),
        *("rollout/filtered_by_function_groups", "rollout/waiting_groups", "rollout/rounds", "rollout/long_step"),
        "rollout/masked_tokens",
        *("rollout/staleness/mean", "rollout/staleness/max", "rollout/tools/calls", "rollout/tools/errors"),
        *(f"rollout/drafts/{of}" for of in ("proposed", "accepted", "acceptance")),
        *("rollout/episodes/turns/mean", "rollout/episodes/turns/max", "rollout/episodes/observed_tokens"),
        *("rollout/episodes/streams/mean", "rollout/episodes/streams/max"),
        *("rollout/episodes/invalid_actions", "rollout/episodes/restarted", "rollout/episodes/success"),
        *("rollout/episodes/given_back_groups", "weights/probe_abs_diff_max", "weights/probe_abs_diff_mean"),
        *(f"rollout/episodes/failures/{of}" for of in ("data", "infra", "replay")),
        *(f"rollout/episodes/finish/{of}" for of in ("environment", "turns", "length", "failed")),
        *(f"perf/{of}_time" for of in (*PHASES, "step", "other", "switch", "train_wait")),
        *("perf/rollout_tail_share", "perf/trainer_bubble", "perf/engine_bubble", "perf/train_imbalance"),
        *(f"perf/env_{what}_time/{of}" for what in ("reset", "step") for of in ("mean", "p99", "max")),
    }
)
"""All with fixed names."""
_OTHERS = re.compile(
    r"train/train_rollout_logprob_abs_diff_age_\d+|rollout/staleness/tokens_\d+|eval/.+|" + re.escape(PREFIX) + ".+"
)
"""Ages of tokens, parts of a reward, held-out sets."""


def is_step_metric(name: str) -> bool:
    """Whether some job's records have a metric of this name."""
    return name in STEP_METRICS or _OTHERS.fullmatch(name) is not None


def like_it(name: str) -> list[str]:
    """Names that a metric may have been meant to have: at most three; by what stands behind the last `/` too."""
    near = difflib.get_close_matches(name, sorted(STEP_METRICS), n=3, cutoff=0.75)
    last = name.rpartition("/")[2]

    def unlike(known: str) -> float:
        return -difflib.SequenceMatcher(None, last, known.rpartition("/")[2]).ratio()

    containing = [known for known in sorted(STEP_METRICS) if last and last in known and known not in near]
    return (near + sorted(containing, key=unlike))[:3]
