"""What one step of a job is made of, from its prompts to what training said, and how far the job is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rljob_worker.rewards.weighted_parts import RewardResult
from rljob_worker.types import FloatArray, Generation, Prompt, StepMetrics


@dataclass(slots=True)
class Progress:
    """The last completed step: what a checkpoint continues from."""

    data_cursor: dict[str, Any]
    """Where the data is after that step's prompts."""
    step: int = 0
    weight_version: int = 0


@dataclass(frozen=True, slots=True)
class Responses:
    """Responses to some prompts, in the order of the requests; each prompt's group is with its reward."""

    generations: list[Generation]
    texts: list[str]
    scored: list[int]
    """The prompts, in the order in which their groups went to the reward."""


@dataclass(slots=True)
class Step:
    """The responses of one step, and what became of them; P prompts, G samples each, prompt-major."""

    number: int
    weight_version: int
    """Of the weights that the responses were generated with."""
    prompts: list[Prompt]
    responses: Responses = field(default_factory=lambda: Responses([], [], []))
    reward_results: list[RewardResult] = field(default_factory=list)
    rewards: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """[P, G]."""
    advantages: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """[P, G]."""
    trained: list[StepMetrics] = field(default_factory=list)
    """What each trainer reports."""

    @property
    def applied(self) -> bool:
        """Whether the weights changed: False when a value that was not finite kept them as they were."""
        return all(result.applied for result in self.trained)

    def non_finite_reason(self) -> str:
        """Where the value that stopped the update came from."""
        reasons = [str(result.detail.get("reason", "")) for result in self.trained if not result.applied]
        return reasons[0] or "a loss or gradient was not finite"

    def samples(self) -> list[dict[str, Any]]:
        """One row a response, for the trajectories."""
        group = self.rewards.shape[1]
        responses = self.responses
        return [
            {
                "prompt_uid": self.prompts[i // group].uid,
                "prompt": self.prompts[i // group].text,
                "label": self.prompts[i // group].label,
                "sample": i % group,
                "response": text,
                "response_tokens": len(generation.token_ids),
                "finish_reason": generation.finish_reason,
                "reward": float(self.rewards[i // group, i % group]),
                "reward_parts": result.parts,
                "reward_error": result.error,
                "advantage": float(self.advantages[i // group, i % group]),
                "weight_version": self.weight_version,
            }
            for i, (generation, text, result) in enumerate(
                zip(responses.generations, responses.texts, self.reward_results)
            )
        ]
