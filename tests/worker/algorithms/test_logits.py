from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rljob_worker.algorithms import logits as module
from rljob_worker.algorithms import response_log_probs
from rljob_worker.types import SamplingParams

VOCAB, PADDED = 50, 56


def make(rows: int = 40, vocab: int = VOCAB, padded: int = PADDED, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(2, rows // 2, padded, generator=generator)
    labels = torch.randint(0, vocab, (2, rows // 2), generator=generator)
    # Padding holds values that would win every maximum.
    logits[..., vocab:] = 100.0
    return logits.requires_grad_(), labels


def kept_by_definition(scaled: Tensor, label: int, sampling: SamplingParams) -> list[int]:
    """Tokens kept for one row without ties, from the filters' definitions in Python floats."""
    alive = set(range(len(scaled)))
    values = scaled.tolist()

    def probs() -> dict[int, float]:
        top = max(values[i] for i in alive)
        total = math.fsum(math.exp(values[i] - top) for i in alive)
        return {i: math.exp(values[i] - top) / total for i in alive}

    if sampling.min_p > 0:
        p = probs()
        alive = {i for i in alive if p[i] >= sampling.min_p * max(p.values())}
    if sampling.top_k > 0:
        alive = set(sorted(alive, key=lambda i: -values[i])[: sampling.top_k])
    if sampling.top_p < 1:
        p, kept, mass = probs(), set(), 0.0
        for i in sorted(alive, key=lambda i: -values[i]):
            if mass >= sampling.top_p:
                break
            kept.add(i)
            mass += p[i]
        alive = kept
    return sorted(alive | {label})


def dense(logits: Tensor, labels: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies by dense fp64 autograd over the tokens kept by definition."""
    log_probs, entropies = [], []
    for row, label in zip(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).tolist(), strict=True):
        scaled = row[:VOCAB] / sampling.temperature
        kept = kept_by_definition(scaled.detach(), label, sampling)
        chosen = torch.log_softmax(scaled[kept], dim=0)
        log_probs.append(chosen[kept.index(label)])
        entropies.append(-(chosen.exp() * chosen).sum())
    return torch.stack(log_probs).view(labels.shape), torch.stack(entropies).view(labels.shape)


SAMPLINGS = [
    SamplingParams(1),
    SamplingParams(1, temperature=0.7),
    SamplingParams(1, temperature=1.7),
    SamplingParams(1, top_k=1),
    SamplingParams(1, top_k=5, temperature=0.6),
    SamplingParams(1, top_p=0.9, temperature=0.7),
    SamplingParams(1, top_p=1e-6),
    SamplingParams(1, min_p=0.1),
    SamplingParams(1, min_p=0.02, top_k=20, top_p=0.8, temperature=1.3),
]


@pytest.mark.parametrize("chunk", [1 << 18, 3 * VOCAB])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_values_and_gradients_equal_dense_fp64(
    sampling: SamplingParams, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", chunk)
    logits, labels = make()
    exact = logits.detach().double().requires_grad_()
    expected = dense(exact, labels, sampling)
    result = response_log_probs(logits, labels, sampling, None, VOCAB, entropy_grad=True)
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-6)
    weights = torch.randn(2, *labels.shape, generator=torch.Generator().manual_seed(1))
    (grad,) = torch.autograd.grad((weights[0] * result[0] + weights[1] * result[1]).sum(), logits)
    (exact_grad,) = torch.autograd.grad((weights[0] * expected[0] + weights[1] * expected[1]).sum(), exact)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=1e-4, atol=1e-5)
    assert (grad[..., VOCAB:] == 0).all()


@pytest.mark.parametrize("sampling", [SamplingParams(1, temperature=0.7), SamplingParams(1, top_k=5, top_p=0.9)])
def test_entropy_carries_a_gradient_only_when_asked(sampling: SamplingParams) -> None:
    logits, labels = make()
    log_probs, entropy = response_log_probs(logits, labels, sampling, None, VOCAB)
    assert log_probs.requires_grad
    assert not entropy.requires_grad
    (grad,) = torch.autograd.grad(log_probs.sum(), logits)
    with_grad = response_log_probs(logits, labels, sampling, None, VOCAB, entropy_grad=True)
    torch.testing.assert_close(entropy, with_grad[1])
    torch.testing.assert_close(torch.autograd.grad(with_grad[0].sum(), logits)[0], grad)
    without = response_log_probs(logits, labels, sampling, None, VOCAB, with_entropy=False)
    torch.testing.assert_close(without[0], log_probs)
    assert (without[1] == 0).all()


def test_bfloat16_logits() -> None:
    logits, labels = make()
    half = logits.detach().bfloat16().requires_grad_()
    sampling = SamplingParams(1, temperature=0.7, top_p=0.9)
    log_probs, _ = response_log_probs(half, labels, sampling, None, VOCAB)
    exact = half.detach().double().requires_grad_()
    expected, _ = dense(exact, labels, sampling)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(log_probs.sum(), half)
    (exact_grad,) = torch.autograd.grad(expected.sum(), exact)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.double(), exact_grad, rtol=1e-2, atol=1e-3)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4, 9.999e3]])
    log_probs, entropy = response_log_probs(logits, torch.tensor([0]), SamplingParams(1), None, 4)
    exact = torch.log_softmax(logits.double(), -1)
    assert log_probs.item() == pytest.approx(exact[0, 0].item(), rel=1e-5)
    assert entropy.item() == pytest.approx(-(exact.exp() * exact).sum().item(), rel=1e-4)


def test_greedy_and_low_temperatures_are_read_as_vllm_reads_them() -> None:
    logits, labels = make()
    plain = response_log_probs(logits, labels, SamplingParams(1), None, VOCAB)[0]
    greedy = SamplingParams(1, temperature=0.0, top_k=3, top_p=0.5, min_p=0.5)
    torch.testing.assert_close(response_log_probs(logits, labels, greedy, None, VOCAB)[0], plain, rtol=0, atol=0)
    low, floor = (SamplingParams(1, temperature=t) for t in (0.001, 0.01))
    results = [response_log_probs(logits, labels, s, None, VOCAB)[0] for s in (low, floor)]
    torch.testing.assert_close(*results, rtol=0, atol=0)
    for top_k in (VOCAB, VOCAB + 10, -1):
        result = response_log_probs(logits, labels, SamplingParams(1, top_k=top_k), None, VOCAB)[0]
        torch.testing.assert_close(result, plain, rtol=0, atol=0)


@pytest.mark.parametrize("sampling", [SamplingParams(1), SamplingParams(1, top_k=3), SamplingParams(1, top_p=0.9)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_shows(bad: float, sampling: SamplingParams) -> None:
    logits, labels = make()
    broken = logits.detach().clone()
    broken[1, 4, 7] = bad
    log_probs, _ = response_log_probs(broken, labels, sampling, None, VOCAB)
    assert not log_probs[1, 4].isfinite()
    log_probs[1, 4] = 0
    assert log_probs.isfinite().all()


@pytest.mark.parametrize("sampling", [SamplingParams(1), SamplingParams(1, top_k=3, top_p=0.9)])
@pytest.mark.parametrize("label", [-100, -1, VOCAB, PADDED])
def test_a_label_outside_the_vocabulary_shows(label: int, sampling: SamplingParams) -> None:
    logits, labels = make()
    labels[0, 3] = label
    log_probs, _ = response_log_probs(logits, labels, sampling, None, VOCAB)
    assert log_probs[0, 3].isnan()
    assert log_probs.isfinite().sum() == labels.numel() - 1


def test_no_positions() -> None:
    logits = torch.zeros(0, PADDED, requires_grad=True)
    log_probs, entropy = response_log_probs(
        logits, torch.zeros(0, dtype=torch.long), SamplingParams(1, top_p=0.5), None, 50
    )
    assert log_probs.shape == entropy.shape == (0,)
    (grad,) = torch.autograd.grad(log_probs.sum(), logits)
    assert grad.shape == logits.shape


def test_bad_arguments_are_named() -> None:
    logits, labels = make()
    with pytest.raises(ValueError, match=r"labels: shape \(1, 20\) does not fit"):
        response_log_probs(logits, labels[:1], SamplingParams(1), None, VOCAB)
    with pytest.raises(ValueError, match="vocabulary has 57"):
        response_log_probs(logits, labels, SamplingParams(1), None, PADDED + 1)
    with pytest.raises(ValueError, match="entropy_grad"):
        response_log_probs(logits, labels, SamplingParams(1), None, VOCAB, with_entropy=False, entropy_grad=True)
    for values, name in (
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
    ):
        with pytest.raises(ValueError, match=f"sampling.{name}"):
            response_log_probs(logits, labels, SamplingParams(1, **values), None, VOCAB)


def test_forward_saves_nothing_as_large_as_the_logits() -> None:
    logits, labels = make()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        response_log_probs(logits, labels, SamplingParams(1, temperature=0.7), None, VOCAB, entropy_grad=True)
    large = [t for t in saved if t.numel() >= logits.numel()]
    assert all(t.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr() for t in large)
