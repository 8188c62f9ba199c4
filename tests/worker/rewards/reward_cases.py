"""Rewards to run and responses to score, for the tests of the reward runner."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rljob_api.spec import RLJobSpec
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rewards.score_calls import RewardSample
from rljob_worker.types import Generation, Prompt

WORDS = ["<unk>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]
Make = Callable[..., tuple[RewardRunner, RLJobSpec]]


def make_spec(reward: dict[str, Any] | None, **data: Any) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "steps": 1,
            "model": {"path": "x"},
            "data": {"synthetic": {}} | data,
            "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 2, "maxResponseTokens": 8},
            "reward": reward,
        }
    )


def samples_of(spec: RLJobSpec, texts: list[str], uid: str = "data/0", label: str = "a b") -> list[RewardSample]:
    assert spec.reward is not None
    prompt = Prompt(uid, "data", "question", (2,), label, spec.reward, {"level": 7})
    samples = []
    for index, text in enumerate(texts):
        token_ids = np.array([WORDS.index(word) for word in text.split()], dtype=np.int64)
        generation = Generation(token_ids, np.zeros(len(token_ids), np.float32), "length")
        samples.append(RewardSample(prompt, index, generation))
    return samples


def soon(seconds: float = 60) -> float:
    return time.monotonic() + seconds


def scores(runner: RewardRunner, spec: RLJobSpec, texts: list[str]) -> list[float]:
    return [result.score for result in runner.score(samples_of(spec, texts), soon())]


def gone(pid: int, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
