"""The logits transform against vLLM's own sampler, run as it runs on CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rljob_worker.algorithms import response_log_probs
from rljob_worker.types import SamplingParams

ROWS = 24


def processed_log_probs(logits: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Sampled tokens [n] and the processed log-probabilities [n, vocab] of vLLM's Sampler."""
    # Seconds, which collection would take in each process of a run of the tests.
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors, MinPLogitsProcessor
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    rows, vocab = logits.shape
    params = VllmSamplingParams(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p, seed=1
    )
    min_p = MinPLogitsProcessor(VllmConfig(), torch.device("cpu"), False)
    added = [(row, params, [], []) for row in range(rows)]
    min_p.update_state(BatchUpdate(batch_size=rows, removed=(), added=added, moved=()))
    metadata = SamplingMetadata(
        temperature=torch.full((rows,), params.temperature),
        all_greedy=False,
        all_random=True,
        # As the input batch builds them: None where no request of the batch uses the filter.
        top_p=torch.full((rows,), params.top_p) if params.top_p < 1 else None,
        top_k=torch.full((rows,), params.top_k, dtype=torch.int32) if 0 < params.top_k < vocab else None,
        generators={row: torch.Generator().manual_seed(row) for row in range(rows)},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(rows),
        presence_penalties=torch.zeros(rows),
        repetition_penalties=torch.ones(rows),
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([min_p]),
    )
    sampler = Sampler(logprobs_mode="processed_logprobs")
    sampled, log_probs = sampler.sample(logits.float().clone(), metadata)
    assert log_probs is not None
    return sampled.long(), log_probs


def random_logits(vocab: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    if kind == "continuous":
        return 3 * torch.randn(ROWS, vocab, generator=generator)
    if kind == "bf16":
        return (3 * torch.randn(ROWS, vocab, generator=generator)).bfloat16()
    # Few distinct values: every boundary falls inside a run of equal logits.
    return torch.randint(0, 4, (ROWS, vocab), generator=generator).float()


@pytest.mark.parametrize("kind", ["continuous", "bf16", "ties"])
@pytest.mark.parametrize("vocab", [17, 300, 4096])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1),
        SamplingParams(1, temperature=0.7),
        SamplingParams(1, temperature=0.001),
        SamplingParams(1, top_k=1),
        SamplingParams(1, top_k=10, temperature=1.3),
        SamplingParams(1, top_k=4096),
        SamplingParams(1, top_p=1e-6),
        SamplingParams(1, top_p=0.9, temperature=0.7),
        SamplingParams(1, top_p=0.999999),
        SamplingParams(1, min_p=0.05),
        SamplingParams(1, min_p=1.0),
        SamplingParams(1, top_k=7, top_p=0.6),
        SamplingParams(1, top_k=12, top_p=0.95, min_p=0.01, temperature=0.8),
    ],
)
def test_equals_vllm(sampling: SamplingParams, vocab: int, kind: str) -> None:
    logits = random_logits(vocab, kind)
    sampled, theirs = processed_log_probs(logits, sampling)
    ours, entropy = response_log_probs(logits, sampled, sampling, None, vocab)
    expected = theirs.gather(1, sampled.unsqueeze(1)).squeeze(1)
    assert expected.isfinite().all()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(entropy, -(theirs.exp() * theirs.clamp(min=-1e4)).sum(-1), rtol=1e-4, atol=1e-4)
    # Not for the sampled token alone: for each that vLLM could have sampled, the first and last of a run of ties too.
    for column in theirs.isfinite().float().topk(min(8, vocab), dim=1).indices.unbind(1):
        expected = theirs.gather(1, column.unsqueeze(1)).squeeze(1)
        possible = expected.isfinite()
        ours, _ = response_log_probs(logits[possible], column[possible], sampling, None, vocab)
        torch.testing.assert_close(ours, expected[possible], rtol=1e-5, atol=2e-6)


def test_the_filters_really_filter() -> None:
    """The comparison above would hold for a transform that nobody applied."""
    logits = random_logits(300, "continuous")
    for sampling in (SamplingParams(1, top_k=5), SamplingParams(1, top_p=0.5), SamplingParams(1, min_p=0.3)):
        _, theirs = processed_log_probs(logits, sampling)
        assert theirs.isfinite().sum() < logits.numel() / 4


def test_a_token_that_the_engine_kept_and_the_trainer_would_not_stays_finite() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, -2.0]], requires_grad=True)
    log_probs, _ = response_log_probs(logits, torch.tensor([3]), SamplingParams(1, top_k=2), None, 4)
    expected = torch.log_softmax(torch.tensor([5.0, 4.0, -2.0]), 0)[2]
    torch.testing.assert_close(log_probs[0], expected)
    (grad,) = torch.autograd.grad(log_probs.sum(), logits)
    assert grad[0, 2] == 0
    assert grad[0, 3] > 0


@pytest.mark.parametrize("sampling", [SamplingParams(1, top_p=0.7), SamplingParams(1, top_k=9, top_p=0.5)])
def test_which_of_equal_tokens_survived_does_not_matter(sampling: SamplingParams) -> None:
    """Had the engine's sort put another one of the equal tokens first, that one would have had the same probability."""
    logits = random_logits(300, "ties")
    _, theirs = processed_log_probs(logits, sampling)
    smallest_kept = torch.where(theirs.isfinite(), theirs, 0.0).min(dim=1).values
    boundary = logits[torch.arange(ROWS), torch.where(theirs.isfinite(), theirs, 0.0).argmin(dim=1)]
    dropped_equals = (logits == boundary.unsqueeze(1)) & theirs.isinf()
    rows = dropped_equals.any(dim=1)
    assert rows.sum() > ROWS / 2
    for labels in (dropped_equals.float().argmax(dim=1), 299 - dropped_equals.flip(1).float().argmax(dim=1)):
        ours, _ = response_log_probs(logits[rows], labels[rows], sampling, None, 300)
        torch.testing.assert_close(ours, smallest_kept[rows], rtol=1e-5, atol=2e-6)
