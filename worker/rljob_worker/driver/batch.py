"""From scored responses to a training batch and the rollout metrics of a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rljob_api import RLJobSpec
from rljob_worker.rollout.seeds import request_seed
from rljob_worker.types import (
    FloatArray,
    Generation,
    GenerationRequest,
    Prompt,
    SamplingParams,
    TrainBatch,
)


def training_sampling(spec: RLJobSpec) -> SamplingParams:
    """How training samples are drawn; the trainer applies the same transform to its logits."""
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
    )


def evaluation_sampling(spec: RLJobSpec) -> SamplingParams:
    """How evaluation samples are drawn: the job's way of stopping, the evaluation's own temperature and nucleus."""
    assert spec.evaluation is not None
    return replace(
        training_sampling(spec),
        max_tokens=spec.evaluation.max_response_tokens or spec.rollout.max_response_tokens,
        temperature=spec.evaluation.temperature,
        top_p=spec.evaluation.top_p,
        top_k=0,
        min_p=0.0,
    )


def requests(prompts: Sequence[Prompt], samples: int, job_seed: int, step: int) -> list[GenerationRequest]:
    """`samples` requests for each prompt, in prompt-major order."""
    return [
        GenerationRequest(prompt.token_ids, request_seed(job_seed, step, index, sample))
        for index, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def split_by_engine(count: int, group: int, engines: int) -> list[range]:
    """Split `count` requests over engines in contiguous ranges of whole prompt groups, as evenly as groups allow."""
    assert count % group == 0, f"{count} requests are not whole groups of {group}"
    prompts = count // group
    bounds = [prompts * e // engines * group for e in range(engines + 1)]
    return [range(bounds[e], bounds[e + 1]) for e in range(engines)]


def train_batch(prompts: Sequence[Prompt], generations: Sequence[Generation], advantages: FloatArray) -> TrainBatch:
    """All samples of a step, prompt-major.

    Args:
        prompts: P prompts.
        generations: P * G responses.
        advantages: [P, G].
    """
    group = len(generations) // len(prompts)
    heads = [np.asarray(prompt.token_ids, dtype=np.int64) for prompt in prompts]
    return TrainBatch(
        tokens=[np.concatenate([heads[i // group], g.token_ids]) for i, g in enumerate(generations)],
        prompt_lengths=np.repeat(np.array([len(head) for head in heads], dtype=np.int64), group),
        rollout_log_probs=[g.log_probs for g in generations],
        advantages=np.ascontiguousarray(advantages.reshape(-1), dtype=np.float32),
    )


def rollout_metrics(generations: Sequence[Generation], rewards: FloatArray, advantages: FloatArray) -> dict[str, float]:
    """slime's `rollout/*` metrics.

    Args:
        generations: P * G responses.
        rewards: [P, G] raw rewards.
        advantages: [P, G].
    """
    lengths = np.array([len(g.token_ids) for g in generations])
    # Compared, not subtracted: the deviation of equal float32 numbers need not come out as 0.
    same = rewards.max(axis=1) == rewards.min(axis=1)
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
        "rollout/truncated_ratio": float(np.mean([g.finish_reason == "length" for g in generations])),
        "rollout/zero_std/count": float(same.sum()),
        "rollout/zero_std/ratio": float(same.mean()),
        "rollout/response_tokens": float(lengths.sum()),
    }
