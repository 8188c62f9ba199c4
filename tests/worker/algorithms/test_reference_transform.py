"""The reference's log-probabilities are of the distribution after the engine's transform (docs/algorithms.md)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rljob_api.spec import KlEstimator
from rljob_worker.algorithms import response_log_probs
from rljob_worker.algorithms.kl import kl_estimate
from rljob_worker.types import SamplingParams

ROWS, VOCABULARY = 512, 64


def of_all_tokens(logits: Tensor, top_p: float) -> Tensor:
    """[ROWS, VOCABULARY] log-probabilities of every token."""
    labels = torch.arange(VOCABULARY).repeat(ROWS)
    sampling = SamplingParams(max_tokens=1, top_p=top_p)
    every = response_log_probs(logits.repeat_interleave(VOCABULARY, 0), labels, sampling, None, VOCABULARY)[0]
    return every.view(ROWS, VOCABULARY)


@pytest.mark.parametrize("top_p", [0.95, 0.7])
def test_a_policy_that_is_the_reference_is_at_distance_0_under_one_transform_alone(top_p: float) -> None:
    logits = 2 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    plain = logits.log_softmax(-1)
    ordered, order = plain.exp().sort(-1, descending=True)
    nucleus = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool).scatter(1, order, ordered.cumsum(-1) - ordered < top_p)
    policy = of_all_tokens(logits, top_p)
    probability = torch.where(nucleus, policy.exp(), 0.0)
    torch.testing.assert_close(probability.sum(-1), torch.ones(ROWS), rtol=1e-5, atol=1e-5)

    def distance(reference: Tensor) -> Tensor:
        return (probability * kl_estimate(policy, reference, KlEstimator.K1)).sum(-1)

    assert distance(of_all_tokens(logits, top_p)).abs().max() < 1e-6
    mass = (plain.exp() * nucleus).sum(-1)
    torch.testing.assert_close(distance(plain), -mass.log(), rtol=1e-4, atol=1e-5)
    assert -mass.log().mean() > 0.04
