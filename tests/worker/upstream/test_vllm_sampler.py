from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from rljob_worker.upstream.switches import SEED
from rljob_worker.upstream.vllm_sampler import KeyedDraw, draw, exponential_noise, key_noise, noise_keys


def splitmix64(state: int, number: int) -> int:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014, written for whole numbers."""
    mask = 2**64 - 1
    z = state + (number + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def triple32(low: int, high: int, j: int) -> int:
    """Wellons' hash of the j-th number of a Weyl sequence from `low`, with `high` put in after the first factor."""
    mask = 2**32 - 1
    x = low + j * 0x9E3779B9 & mask
    x = ((x ^ (x >> 17)) * 0xED5AD4BB & mask) ^ high
    x = (x ^ (x >> 11)) * 0xAC4C1B51 & mask
    x = (x ^ (x >> 15)) * 0x31848BAB & mask
    return x ^ (x >> 14)


def keys(*seeds: int, position: int = 5) -> Tensor:
    return noise_keys(np.array(seeds, dtype=np.uint64), np.full(len(seeds), position, dtype=np.uint64))


def whole(logits: Tensor, _k: Tensor | None, _p: Tensor | None) -> Tensor:
    return logits


def test_noise_is_the_logarithm_of_the_published_hashes() -> None:
    seeds, positions = [0, 1, 2**63 - 1, 2**64 - 1, 123456789], [0, 1, 7, 40_000, 2**31]
    made = noise_keys(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64))
    expected = []
    for seed, position in zip(seeds, positions):
        high, low = divmod(splitmix64(splitmix64(seed, 0), position), 2**32)
        expected.append([-math.log1p(-((triple32(low, high, j) & 0x7FFFFFFF) + 0.5) * 2.0**-31) for j in range(1, 8)])
    torch.testing.assert_close(exponential_noise(made, 7), torch.tensor(expected), rtol=2e-6, atol=0)


def test_noise_is_exponential_and_without_correlation() -> None:
    seeds = np.arange(16, dtype=np.uint64).repeat(16)
    positions = np.tile(np.arange(16, dtype=np.uint64), 16)
    noise = exponential_noise(noise_keys(seeds, positions), 4096).double()
    assert bool(((noise > 0) & noise.isfinite()).all())
    ordered = (1 - (-noise).exp()).flatten().sort().values
    ideal = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    # Kolmogorov-Smirnov at one in a million.
    assert float((ordered - ideal).abs().max()) * math.sqrt(len(ordered)) < 2.7
    scaled = (noise - 1) / math.sqrt(noise.numel())
    for shifted in (scaled.roll(1, 0), scaled.roll(16, 0), scaled.roll(1, 1)):
        assert abs(float((scaled * shifted).sum())) * math.sqrt(noise.numel()) < 5


def test_the_smallest_and_largest_noise_are_finite() -> None:
    """The hash is a bijection of 32 bits, so that somebody's noise has each of them."""
    for bits, expected in ((0, 2.0**-32), (0x7FFFFFFF, 24 * math.log(2))):
        uniform = torch.tensor([float(bits)]).add_(0.5).mul_(2.0**-31 * (1 - 2.0**-24))
        torch.testing.assert_close(uniform.neg().log1p().neg(), torch.tensor([expected]), rtol=1e-6, atol=0)


def test_tokens_follow_the_distribution_after_top_k() -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    draws = 20_000
    for made in (keys(*range(draws)), noise_keys(np.zeros(draws, np.uint64), np.arange(draws, dtype=np.uint64))):
        tokens, log_probs = draw(
            logits.repeat(draws, 1), made, torch.full((draws,), 4, dtype=torch.int32), None, apply_top_k_top_p
        )
        expected = torch.cat([logits[:4].softmax(0), torch.zeros(2)])
        torch.testing.assert_close(log_probs[0].exp(), expected)
        counts = torch.bincount(tokens, minlength=6)
        assert counts[4:].sum() == 0
        chi_square = ((counts - draws * expected)[:4] ** 2 / (draws * expected[:4])).sum()
        assert float(chi_square) < 30.7  # three degrees of freedom, one in a million


def test_a_token_depends_on_its_own_seed_and_position_alone() -> None:
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))

    def draws(rows: list[int]) -> list[list[int]]:
        seeds = [100 + row for row in rows]
        return [draw(logits[rows], keys(*seeds, position=i), None, None, whole)[0].tolist() for i in range(20)]

    together, reversed_ = draws([0, 1, 2, 3, 4]), draws([4, 3, 2, 1, 0])
    assert together == [step[::-1] for step in reversed_]
    assert [step[2] for step in together] == [step[0] for step in draws([2])]
    assert len({tuple(step) for step in together}) > 1, "the noise is the same at each position"


def runner(requests: dict[str, tuple[int | None, int]], part: object = None) -> SimpleNamespace:
    """A worker with requests of (seed, tokens so far), in the rows of a batch that has room for one more."""
    extra = {name: None if seed is None else {SEED: seed} for name, (seed, _) in requests.items()}
    batch = SimpleNamespace(
        num_reqs=len(requests),
        req_ids=list(requests),
        num_tokens_no_spec=np.array([*(length for _, length in requests.values()), 99], dtype=np.int32),
    )
    return SimpleNamespace(
        input_batch=batch,
        requests={
            name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=args)) for name, args in extra.items()
        },
        sampler=SimpleNamespace(topk_topp_sampler=part),
    )


def test_a_worker_draws_by_request_and_length_wherever_the_row_is() -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    first = KeyedDraw(runner({"a": (7, 12), "greedy": (None, 3), "b": (8, 40)}), whole)(logits, {}, None, None)[0]
    other = KeyedDraw(runner({"b": (8, 40), "a": (7, 12)}), whole)(logits[[2, 0]], {}, None, None)[0]
    assert [first[0], first[2]] == [other[1], other[0]]
    expected = draw(logits[:1], noise_keys(np.array([7], np.uint64), np.array([12], np.uint64)), None, None, whole)[0]
    assert first[0] == expected[0]
    with pytest.raises(RuntimeError, match="2 rows of logits for 3 requests"):
        KeyedDraw(runner({"a": (1, 1), "b": (2, 2), "c": (3, 3)}), whole)(logits[:2], {}, None, None)


def test_a_devices_own_truncation_is_kept() -> None:
    part = SimpleNamespace(apply_top_k_top_p=lambda logits, k, p: logits.masked_fill(torch.arange(64) != 9, -math.inf))
    key_noise(runner({"a": (7, 12)}, part))
    tokens, log_probs = part.forward(torch.zeros(1, 64), {}, None, None)
    assert tokens.tolist() == [9]
    assert float(log_probs[0, 9]) == 0.0
