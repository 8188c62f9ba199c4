"""Tokens that are never sampled: their probability is 0 in the trainer as in the engine."""

from __future__ import annotations

import pytest
import torch

from rljob_worker.algorithms import response_log_probs
from rljob_worker.algorithms.output_layer import Wanted, output_log_probs
from rljob_worker.types import SamplingParams

FORBIDDEN = (1, 6)


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.05}, {"temperature": 0.0}])
def test_forbidden_tokens_have_no_share(filters: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(9, 16, generator=generator)
    weight = torch.randn(12, 16, generator=generator).requires_grad_()
    labels = torch.tensor([0, 2, 3, 4, 5, 7, 8, 9, 10])
    sampling = SamplingParams(1, forbidden=FORBIDDEN, **filters)
    found, entropy = output_log_probs(hidden, weight, labels, Wanted(sampling, 11), None)
    # The same distribution by a model that does not have the tokens.
    there = [token for token in range(11) if token not in FORBIDDEN]
    again = torch.tensor([there.index(int(label)) for label in labels])
    expected, expected_entropy = response_log_probs(
        (hidden @ weight.t())[:, there], again, SamplingParams(1, **filters), None, len(there)
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    [gradient] = torch.autograd.grad(found.sum(), weight)
    [expected_gradient] = torch.autograd.grad(expected.sum(), weight)
    torch.testing.assert_close(gradient, expected_gradient)
    assert not gradient[list(FORBIDDEN)].any()
