from __future__ import annotations

import math

import torch

from rljob_worker.upstream.vllm_sampler import draw, exponential_noise


def splitmix64(state: int) -> int:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014, written for whole numbers."""
    mask = 2**64 - 1
    z = state & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def generators(*seeds: int) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}


def test_noise_is_the_logarithm_of_splitmix64() -> None:
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    noise = exponential_noise(torch.tensor(keys), 7)
    expected = [
        [-math.log(((splitmix64(key + j * 0x9E3779B97F4A7C15) >> 11) + 0.5) * 2.0**-53) for j in range(1, 8)]
        for key in keys
    ]
    torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-6, atol=0)


def test_noise_is_exponential_and_without_correlation() -> None:
    noise = exponential_noise(torch.arange(256), 4096).double()
    assert bool((noise > 0).all())
    ordered = (1 - (-noise).exp()).flatten().sort().values
    ideal = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    # Kolmogorov-Smirnov at one in a million.
    assert float((ordered - ideal).abs().max()) * math.sqrt(len(ordered)) < 2.7
    scaled = (noise - 1) / math.sqrt(noise.numel())
    for shifted in (scaled.roll(1, 0), scaled.roll(1, 1)):
        assert abs(float((scaled * shifted).sum())) * math.sqrt(noise.numel()) < 5


def test_tokens_follow_the_distribution_after_top_k() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    draws = 20_000
    tokens, log_probs = draw(
        logits.repeat(draws, 1), generators(*range(draws)), torch.full((draws,), 4, dtype=torch.int32), None
    )
    expected = torch.cat([logits[:4].softmax(0), torch.zeros(2)])
    torch.testing.assert_close(log_probs[0].exp(), expected)
    counts = torch.bincount(tokens, minlength=6)
    assert counts[4:].sum() == 0
    chi_square = ((counts - draws * expected)[:4] ** 2 / (draws * expected[:4])).sum()
    assert float(chi_square) < 30.7  # three degrees of freedom, one in a million


def test_a_request_depends_on_its_own_seed_alone() -> None:
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))

    def draws(rows: list[int]) -> list[list[int]]:
        own = generators(*(100 + row for row in rows))
        return [draw(logits[rows], own, None, None)[0].tolist() for _ in range(20)]

    together, reversed_ = draws([0, 1, 2, 3, 4]), draws([4, 3, 2, 1, 0])
    assert together == [step[::-1] for step in reversed_]
    assert [step[2] for step in together] == [step[0] for step in draws([2])]
    assert len({tuple(step) for step in together}) > 1, "the noise is the same at each position"


def test_greedy_neighbours_have_no_seed_and_change_nothing() -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    alone = draw(logits[1:2], generators(7), None, None)[0].tolist()
    mixed = draw(logits, {1: torch.Generator().manual_seed(7)}, None, None)[0].tolist()
    assert mixed[1] == alone[0]
