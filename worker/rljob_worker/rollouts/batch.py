"""From scored responses to a training batch and the rollout metrics of a step. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rljob_api import RLJobSpec
from rljob_api.how_many import how_many
from rljob_api.spec import RolloutSpec
from rljob_worker.engine.reports import DraftCounts
from rljob_worker.flow import Decision, Finish, Group
from rljob_worker.flow.streams import NO_VERSION
from rljob_worker.flow.turns import Turn
from rljob_worker.models.pictures import PictureFacts, batch_pictures
from rljob_worker.rollouts.step import Step
from rljob_worker.types import FloatArray, Picture, SamplingParams, TrainBatch


def training_sampling(spec: RLJobSpec, pictures: PictureFacts | None = None) -> SamplingParams:
    """Sampling of training samples; the trainer applies the same transform to its logits.

    Args:
        spec: the job.
        pictures: the way that the model takes the data's, whose placeholders are never sampled; None: there are none.
    """
    rollout = spec.rollout
    return SamplingParams(
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
        forbidden=() if pictures is None else pictures.placeholders,
    )


def evaluation_sampling(spec: RLJobSpec, pictures: PictureFacts | None = None) -> SamplingParams:
    """Sampling of evaluation samples: the job's way of stopping, the evaluation's own temperature and nucleus."""
    assert spec.evaluation is not None
    return replace(
        training_sampling(spec, pictures),
        max_tokens=spec.evaluation.max_response_tokens or spec.rollout.max_response_tokens,
        temperature=spec.evaluation.temperature,
        top_p=spec.evaluation.top_p,
        top_k=0,
        min_p=0.0,
    )


def train_batch(
    groups: Sequence[Group],
    advantages: FloatArray,
    oldest: int = 0,
    *,
    by_critic: bool = False,
    pictures: Sequence[Sequence[Picture]] = (),
    facts: PictureFacts | None = None,
) -> TrainBatch:
    """The streams of a step, one after the other.

    Args:
        groups: what is trained on; N samples together.
        advantages: [N], the same for all of a sample's tokens.
        oldest: tokens of weights before these count as not sampled: nothing is learned from them.
        by_critic: whether `advantages` are rewards, of which a critic makes the advantages of tokens.
        pictures: of each group's prompt.
        facts: how the model takes them; None: it takes none.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    streams = [stream for episode in episodes for stream in episode.streams]
    several = len(streams) > len(episodes)
    samples = np.repeat(np.arange(len(episodes)), [len(episode.streams) for episode in episodes]) if several else None
    experts = [episode.experts for episode in episodes if episode.experts is not None]
    lengths = np.array([len(stream) for stream in streams], dtype=np.int64)
    spans = [span for stream in streams for span in stream.spans]
    # Of all tokens at once: an array for each stream would take twice the time.
    of_spans = np.array([NO_VERSION if span.version is None else span.version for span in spans], dtype=np.int64)
    versions = np.repeat(of_spans, [len(span) for span in spans])
    # What was not sampled has a version below all.
    is_sampled = versions >= oldest
    counts = np.add.reduceat(is_sampled, np.cumsum(lengths) - lengths, dtype=np.int64)
    of_streams = advantages if samples is None else advantages[samples]
    return TrainBatch(
        tokens=np.concatenate([stream.ids for stream in streams]),
        lengths=lengths,
        sampled=is_sampled,
        rollout_log_probs=np.concatenate([stream.log_probs for stream in streams])[is_sampled],
        advantages=np.repeat(of_streams.astype(np.float32), counts),
        versions=versions[is_sampled],
        experts=np.concatenate(experts) if experts else None,
        rewards=of_streams.astype(np.float32) if by_critic else None,
        pictures=None
        if facts is None
        else batch_pictures(
            [stream.ids for stream in streams],
            [seen for group, seen in zip(groups, pictures, strict=True) for _ in group.episodes],
            facts,
        ),
        samples=samples,
    )


def partial_metrics(step: Step) -> dict[str, float]:
    """Metrics of partial rollout in a step: what it sampled, and what it carries over."""
    streams = [stream for one in (*step.left, *step.groups) for e in one.episodes for stream in e.streams]
    return {
        "rollout/carried_groups": float(len(step.left)),
        "rollout/carried_tokens": float(sum(one.num_sampled for one in step.left)),
        "rollout/generated_tokens": float(sum(s.tokens_by_version()[step.weight_version] for s in streams)),
    }


def staleness_metrics(step: Step) -> dict[str, float]:
    """Age of the tokens that a step trains on: updates between the weights that sampled a token and those that are
    trained."""
    versions: Counter[int] = Counter()
    for stream in step.trained_streams():
        versions.update(stream.tokens_by_version())
    counts = {step.weight_version - v: count for v, count in versions.items() if v >= step.oldest_trained}
    oldest, tokens = max(counts, default=0), sum(counts.values())
    metrics = {
        "rollout/staleness/mean": sum(staleness * count for staleness, count in counts.items()) / tokens
        if tokens
        else 0.0,
        "rollout/staleness/max": float(oldest),
    }
    shown = range(oldest + 1) if counts else ()
    return metrics | {f"rollout/staleness/tokens_{staleness}": float(counts.get(staleness, 0)) for staleness in shown}


def limit_metrics(step: Step) -> dict[str, float]:
    """Data too old for a step: tokens that were left out of its loss, and groups that are sampled again."""
    spans = [span for stream in step.trained_streams() for span in stream.spans]
    return {
        "rollout/masked_tokens": float(sum(len(span) for span in spans if span.older_than(step.oldest_trained))),
        "rollout/discarded_groups": float(len(step.discarded)),
        "rollout/discarded_tokens": float(sum(one.num_sampled for one in step.discarded)),
    }


def tail_metrics(step: Step) -> dict[str, float]:
    """Metrics of tail batching in a step: its kind, what waits, and tokens that will be sampled again."""
    deferred, surplus = step.deferred, step.of(Decision.SURPLUS)
    return {
        "rollout/long_step": float(step.long),
        "rollout/waiting_groups": float(sum(one.deferred_at is not None for one in step.left)),
        "rollout/deferred_groups": float(len(deferred)),
        "rollout/deferred_tokens": float(sum(one.num_sampled for one in deferred)),
        "rollout/surplus_groups": float(len(surplus)),
        "rollout/surplus_tokens": float(sum(sum(group.lengths) for group in surplus)),
    }


def too_few_groups(step: Step, rollout: RolloutSpec) -> str:
    """Message about a step whose filter took too many groups."""
    oversampling = rollout.oversampling
    assert oversampling is not None
    filtered = step.of(Decision.FILTERED)
    refused = sum(group.kept is False for group in filtered)
    passed = " and ".join(filter(None, [oversampling.filter and oversampling.filter.value, oversampling.function]))
    said = (
        f"spec.rollout.oversampling: step {step.number} drew {how_many(step.drawn, 'prompt')} in "
        f"{how_many(step.rounds, 'round')} (limit {oversampling.limit} times promptsPerStep), and {step.passed} of the "
        f"{how_many(rollout.prompts_per_step, 'group')} that it needs passed {passed}; "
    )
    if refused:
        said += f"the function left {refused} out"
    if refused < len(filtered):
        rewards = Counter(float(group.rewards[0]) for group in filtered if group.kept is not False)
        most = ", ".join(f"{count} x {reward:g}" for reward, count in rewards.most_common(3))
        said += (", and the rewards of others are" if refused else "the others' rewards are") + f" all equal ({most})"
    return (
        f"{said}: the task is too hard or too easy for the policy, or the reward cannot tell "
        "responses apart; other data, a higher limit, or earlyStop where all is solved"
    )


def oversampling_metrics(step: Step) -> dict[str, float]:
    """Cost of over-sampling in a step: rounds, and the groups and tokens that were not trained on."""
    metrics = {"rollout/rounds": float(step.rounds)}
    for decision in (Decision.FILTERED, Decision.SURPLUS):
        groups = step.of(decision)
        metrics[f"rollout/{decision.value}_groups"] = float(len(groups))
        metrics[f"rollout/{decision.value}_tokens"] = float(sum(sum(group.lengths) for group in groups))
    if any(group.kept is not None for group in step.groups):
        metrics["rollout/filtered_by_function_groups"] = float(sum(group.kept is False for group in step.groups))
    return metrics


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of episodes of several turns; empty where there are none."""
    episodes = [one for group in groups for one in group.episodes if one.opening is not None]
    if not episodes:
        return {}
    turns = [len(one.turns) for one in episodes]
    streams = [stream for one in episodes for stream in one.streams]
    observed = [len(stream) - stream.prompt_length - stream.num_sampled for stream in streams]
    reached = [one.turns[-1].values["success"] for one in episodes if "success" in one.turns[-1].values]
    answers = [turn for one in episodes for turn in one.turns]
    finishes = Counter(one.finish for one in episodes)
    return {
        "rollout/episodes/turns/mean": sum(turns) / len(episodes),
        "rollout/episodes/turns/max": float(max(turns)),
        **{
            f"rollout/episodes/finish/{finish.value}": finishes[finish] / len(episodes)
            for finish in (Finish.ENVIRONMENT, Finish.TURNS, Finish.LENGTH, Finish.FAILED)
        },
        "rollout/episodes/observed_tokens": float(sum(observed)),
        "rollout/episodes/streams/mean": len(streams) / len(episodes),
        "rollout/episodes/streams/max": float(max(len(one.streams) for one in episodes)),
        "rollout/episodes/invalid_actions": float(sum(turn.values.get("valid") == 0 for turn in answers)),
        "rollout/episodes/restarted": float(sum(one.restarts for one in episodes)),
        **_tool_metrics([turn for turn in answers if "tool_calls" in turn.values]),
        **({"rollout/episodes/success": sum(reached) / len(reached)} if reached else {}),
    }


def _tool_metrics(turns: Sequence[Turn]) -> dict[str, float]:
    """Calls of tools; empty where there are none."""
    if not turns:
        return {}
    return {
        "rollout/tools/calls": float(sum(turn.values["tool_calls"] for turn in turns)),
        "rollout/tools/errors": float(sum(turn.values.get("tool_errors", 0.0) for turn in turns)),
    }


def draft_metrics(drafts: DraftCounts) -> dict[str, float]:
    """Share of the right guesses of speculative decoding."""
    return {
        "rollout/drafts/proposed": float(drafts.proposed),
        "rollout/drafts/accepted": float(drafts.accepted),
        "rollout/drafts/acceptance": drafts.accepted / drafts.proposed,
    }


def rollout_metrics(groups: Sequence[Group], advantages: FloatArray) -> dict[str, float]:
    """slime's `rollout/*` metrics, over everything that was generated, filtered groups included.

    Args:
        groups: of the step.
        advantages: [N], of the samples that are trained on.
    """
    lengths = np.array([length for group in groups for length in group.lengths])
    by_group = [group.rewards for group in groups]
    rewards = np.concatenate(by_group)
    finishes = [episode.finish for group in groups for episode in group.episodes]
    # Compared, not subtracted: the deviation of equal float32 numbers need not come out as 0.
    same = np.array([of_group.max() == of_group.min() for of_group in by_group])
    return {
        "rollout/raw_reward": float(rewards.mean()),
        "rollout/raw_reward_std": float(rewards.std()),
        "rollout/raw_reward_min": float(rewards.min()),
        "rollout/raw_reward_max": float(rewards.max()),
        "rollout/rewards": float(advantages.mean()),
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/median": float(np.median(lengths)),
        "rollout/response_len/max": float(lengths.max()),
        "rollout/response_len/min": float(lengths.min()),
        "rollout/truncated_ratio": float(np.mean([finish is Finish.LENGTH for finish in finishes])),
        "rollout/zero_std/count": float(same.sum()),
        "rollout/zero_std/ratio": float(same.mean()),
        "rollout/response_tokens": float(lengths.sum()),
    }
