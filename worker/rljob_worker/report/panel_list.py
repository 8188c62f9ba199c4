"""The panels of a report whose metrics have fixed names. A panel is drawn where a run measured one of its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rljob_api.how_many import how_many
from rljob_api.metrics import ROLLOUT_TAIL_KEY
from rljob_api.phases import PHASES

COLORS = ("#1f77b4", "#d62728", "#238b45", "#9467bd", "#fd8d3c", "#525252")
"""Colours of the curves of a panel, in order: no panel has more curves."""
SHARE = "share"
_GROUPS = {"filtered": "filtered", "surplus": "surplus", "deferred": "deferred", "discarded": "discarded"}


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that belong together."""

    title: str
    unit: str
    curves: Mapping[str, str]
    """Metric -> label."""
    sparse: bool = False
    """Measured in some steps only: those are marked and joined."""


_LEARNING = (
    Panel("Response length", "tokens", {
        "rollout/response_len/max": "longest", "rollout/response_len/mean": "mean",
        "rollout/response_len/median": "median", "rollout/response_len/min": "shortest",
    }),
    Panel("Truncated responses", SHARE, {"rollout/truncated_ratio": "cut at maxResponseTokens"}),
    Panel("Entropy of the policy", "nats", {"train/entropy_loss": "mean over tokens"}),
    Panel("Gradient norm", "before clipping", {
        "train/grad_norm": "gradient norm", "critic/grad_norm": "of the critic",
    }),
    Panel("Loss", "weighted sum over tokens", {
        "train/loss": "with all its terms", "train/pg_loss": "of the policy alone",
    }),
    Panel("Learning rate", "", {"train/lr": "of the policy", "critic/lr": "of the critic"}),
    Panel("KL divergence", "nats", {
        "train/kl_loss": "to the reference", "train/ppo_kl": "to the policy before the step",
        "train/mismatch_kl": "trainer to engine",
    }),
    Panel("Distance to the teacher", "nats", {"train/teacher_kl": "mean over tokens"}),
    Panel("Clipped tokens", SHARE, {
        "train/pg_clipfrac": "by the policy loss", "train/tis_clipfrac": "by TIS",
        "train/off_policy_masked": "left out as off-policy", "critic/value_clip_fraction": "values of the critic",
    }),
    Panel("Importance weights of TIS", "ratio, mean over tokens", {"train/tis": "before they are cut"}),
    Panel("Critic", "share, below 0: worse than none", {
        "critic/explained_variance": "explained variance of the returns",
    }),
    Panel("Loss of the critic", "squared distance", {"critic/value_loss": "mean over updates"}),
    Panel("Values and returns", "reward", {"critic/value_mean": "mean value", "critic/return_mean": "mean return"}),
    Panel("Advantages", "mean over samples", {"rollout/rewards": "advantage"}),
    Panel("Spread of the rewards", "reward", {"rollout/raw_reward_std": "standard deviation over samples"}),
    Panel("Change of the adapters that rounding lost", SHARE, {"train/lora_change_lost": "of what engines got"}),
    Panel("Experts that the trainer would have chosen otherwise", SHARE, {"train/router_mismatch": "of all choices"}),
    Panel("Engines against trainers after a hand-over of weights", "nats", {
        "weights/probe_abs_diff_max": "largest of any token", "weights/probe_abs_diff_mean": "mean over tokens",
    }, sparse=True),
)  # fmt: skip
_SAMPLING = (
    Panel("Groups without a signal", SHARE, {"rollout/zero_std/ratio": "all rewards of the group are equal"}),
    Panel("Number of groups without a signal", "groups", {"rollout/zero_std/count": "all rewards are equal"}),
    Panel("Tokens of the responses", "tokens", {
        "rollout/response_tokens": "of the groups that ended", "rollout/generated_tokens": "generated in the step",
    }),
    Panel("Tokens generated and not trained on", "tokens", {
        **{f"rollout/{name}_tokens": label for name, label in _GROUPS.items()}, "rollout/masked_tokens": "masked",
    }),
    Panel("Groups that were not trained on", "groups", {
        **{f"rollout/{name}_groups": label for name, label in _GROUPS.items()},
        "rollout/filtered_by_function_groups": "filtered by your function",
        "rollout/episodes/given_back_groups": "drawn again: their environments were lost",
    }),
    Panel("Rounds of sampling", "rounds", {"rollout/rounds": "until enough groups passed"}),
    Panel("Tail of rollout", SHARE, {ROLLOUT_TAIL_KEY: "fewer than half of the places busy"}),
    Panel("Steps for long responses", "1: such a step", {"rollout/long_step": "of tail batching"}),
    Panel("Tokens of responses that go on in the next step", "tokens", {"rollout/carried_tokens": "carried"}),
    Panel("Groups that go on in a later step", "groups", {
        "rollout/carried_groups": "carried", "rollout/waiting_groups": "deferred before, and waiting",
    }),
    Panel(
        "Trainer's log-probabilities to the engine's, by age of the token",
        "nats, mean distance",
        {
            f"train/train_rollout_logprob_abs_diff_age_{age}": f"{how_many(age, 'update')} old"
            for age in range(len(COLORS))
        },
    ),
    Panel("Age of the tokens trained on", "updates", {
        "rollout/staleness/mean": "mean", "rollout/staleness/max": "oldest",
    }),
    Panel("Lanes that wait", SHARE, {
        "perf/trainer_bubble": "trainers", "perf/engine_bubble": "engines",
    }),
    Panel("Work of the trainer that all wait for", "that of the mean trainer: 1", {"perf/train_imbalance": "planned"}),
    Panel("Guesses of speculative decoding", SHARE, {"rollout/drafts/acceptance": "accepted"}),
    Panel("Tokens guessed by speculative decoding", "tokens", {
        "rollout/drafts/proposed": "proposed", "rollout/drafts/accepted": "accepted",
    }),
    Panel("Parts of the reward that are not recorded", "parts", {"rollout/reward_parts_left_out": "left out"}),
)  # fmt: skip
_EPISODES = (
    Panel("Episodes that reached their goal", SHARE, {"rollout/episodes/success": "of those that ended"}),
    Panel("Turns of an episode", "turns", {
        "rollout/episodes/turns/mean": "mean", "rollout/episodes/turns/max": "most",
    }),
    Panel("Streams of an episode", "streams", {
        "rollout/episodes/streams/mean": "mean", "rollout/episodes/streams/max": "most",
    }),
    Panel("What ended the episodes", SHARE, {
        "rollout/episodes/finish/environment": "the environment", "rollout/episodes/finish/turns": "number of turns",
        "rollout/episodes/finish/length": "number of tokens", "rollout/episodes/finish/failed": "a failure",
    }),
    Panel("Failures of environments", "episodes", {
        "rollout/episodes/failures/infra": "of machines", "rollout/episodes/failures/data": "of the data",
        "rollout/episodes/failures/replay": "not made again as they were", "rollout/episodes/restarted": "began anew",
    }),
    Panel("Answers that an environment could not take", "turns", {"rollout/episodes/invalid_actions": "invalid"}),
    Panel("Tokens that environments answered", "tokens", {"rollout/episodes/observed_tokens": "observed"}),
    Panel("Calls of tools", "calls", {"rollout/tools/calls": "all", "rollout/tools/errors": "failed"}),
    *(
        Panel(f"Seconds of an environment's {what}", "seconds", {
            f"perf/env_{what}_time/{of}": label for of, label in (("mean", "mean"), ("p99", "99 %"), ("max", "longest"))
        })
        for what in ("reset", "step")
    ),
)  # fmt: skip
PANELS = (*_LEARNING, *_SAMPLING, *_EPISODES)

ELSEWHERE = {
    **dict.fromkeys((f"perf/{name}_time" for name in (*PHASES, "other")), "the chart and the table of phases"),
    "perf/step_time": "the chart of phases: the height of a bar",
    "perf/switch_time": "the table at the top, and its phases",
    "perf/train_wait_time": "the phases outside training, added up",
    **dict.fromkeys((f"rollout/raw_reward{end}" for end in ("", "_min", "_max")), "the chart of the reward"),
    "train/train_rollout_logprob_abs_diff": "the chart of trainer against engine",
    "train/train_rollout_logprob_abs_diff_max": "the chart of trainer against engine",
}
"""Metrics that no panel has -> where the report shows them."""
