"""Each algorithm that rewards alone teach, from them to gradient, teaches a table of logits the right tokens.

Eight prompts, responses of four to six tokens, eight symbols: chance gives a reward of an eighth. With rewards that are
dealt out anew among a prompt's samples the same code must stay there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rljob_api.spec import AlgorithmSpec
from rljob_worker.algorithms import (
    LossInputs,
    get_algorithm,
    policy_gradient_loss,
    registered,
    step_advantages,
    token_weights,
)

PROMPTS, GROUP, LENGTH, SYMBOLS = 8, 8, 6, 8
STEPS, UPDATES = 50, 2

SETTINGS: dict[str, dict[str, Any]] = {
    "reinforce": {"rewards": {"center": "Batch", "scale": "Batch", "clip": 5}, "advantageClip": 2},
    # Two updates a step with the published bounds of 3e-4 would hardly move a table this small.
    "gspo": {"clipLow": 0.1, "clipHigh": 0.1},
}


def sampled(logits: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [P, G, L] and which of them are the response's."""
    noise = torch.rand(PROMPTS, GROUP, LENGTH, SYMBOLS, generator=generator).log_().neg_()
    tokens = (logits.softmax(-1).unsqueeze(1) / noise).argmax(-1)
    lengths = torch.randint(4, LENGTH + 1, (PROMPTS, GROUP, 1), generator=generator)
    return tokens, torch.arange(LENGTH) < lengths


def trained(name: str, *, honest: bool = True) -> float:
    """Mean reward of the last ten steps."""
    spec = AlgorithmSpec(name=name, **SETTINGS.get(name, {}))
    algorithm = get_algorithm(name)
    generator = torch.Generator().manual_seed(7)
    wanted = torch.randint(SYMBOLS, (PROMPTS, 1, LENGTH), generator=generator)
    logits = torch.zeros(PROMPTS, LENGTH, SYMBOLS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.15)
    means = []
    for _ in range(STEPS):
        tokens, mask = sampled(logits.detach(), generator)
        rewards = ((tokens == wanted) & mask).sum(-1) / mask.sum(-1)
        means.append(rewards.mean().item())
        told = rewards if honest else rewards.gather(1, torch.rand(rewards.shape, generator=generator).argsort(1))
        advantages = step_advantages(algorithm, told.flatten(), [GROUP] * PROMPTS, mask.sum(-1).flatten(), spec)
        flat = mask.flatten(0, 1)
        weights = token_weights(
            flat, spec.aggregation, num_tokens=flat.sum(), num_sequences=len(flat), constant_length=LENGTH
        )
        old = None
        for _ in range(UPDATES):
            log_probs = logits.log_softmax(-1).unsqueeze(1).expand(-1, GROUP, -1, -1)
            log_probs = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).flatten(0, 1)
            old = log_probs.detach() if old is None else old
            inputs = LossInputs(log_probs, advantages, flat, weights, old_log_probs=old, rollout_log_probs=old)
            loss, _ = policy_gradient_loss(inputs, spec, algorithm.token_loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return sum(means[-10:]) / 10


def learns_from_rewards_alone(name: str) -> bool:
    algorithm = get_algorithm(name)
    return not algorithm.needs_critic and not algorithm.needs_teacher


@pytest.mark.parametrize("name", [name for name in registered() if learns_from_rewards_alone(name)])
def test_learns_from_rewards_and_not_without(name: str) -> None:
    assert trained(name) > 0.9
    assert trained(name, honest=False) < 0.5
