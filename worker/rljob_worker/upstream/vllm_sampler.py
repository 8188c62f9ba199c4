"""Drawing tokens on CPU: one vectorised pass for a whole batch of requests that have a seed each."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_worker.upstream.patch import VLLM, Patch, Process

_GAMMA = -0x61C8864680B583EB
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15
"""SplitMix64's constants (Steele, Lea and Flood 2014) as signed integers: torch's int64 wraps as uint64 does."""


def draw(
    logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """In the place of vLLM's `TopKTopPSampler.forward_cpu`, with `logprobs_mode=processed_logprobs`.

    Each request's generator gives one number a step, and that number and the token's index are hashed to the noise of
    each token. A request's tokens depend on its own seed alone.

    Returns:
        Tokens [N] int64 and log-probabilities [N, V] float32 of logits [N, V] after top-k and top-p.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    log_probs = apply_top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
    keys = torch.empty(len(logits), dtype=torch.int64)
    if len(generators) != len(logits):
        # vLLM samples greedy requests along with the others, and drops what came out for them.
        keys.random_()
    for row, generator in generators.items():
        keys[row].random_(generator=generator)
    # The token with the least q / p among independent exponential q is distributed as p.
    return log_probs.exp().div_(exponential_noise(keys, logits.shape[-1])).argmax(dim=-1), log_probs


def exponential_noise(keys: Tensor, count: int) -> Tensor:
    """Standard exponential numbers [N, count] float32 from keys [N] int64: row i depends on key i alone."""
    bits = torch.arange(1, count + 1, dtype=torch.int64).mul_(_GAMMA) + keys[:, None]
    other = torch.empty_like(bits)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        _shift_right(bits, shift, other)
        bits.bitwise_xor_(other).mul_(factor)
    _shift_right(bits, 31, other)
    _shift_right(bits.bitwise_xor_(other), 11, other)
    # The 53 highest bits, in the middle of their interval: never 0 and never 1.
    uniform = other.to(torch.float64).add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().to(torch.float32)


def _shift_right(bits: Tensor, places: int, out: Tensor) -> None:
    """Logical shift: torch's own copies the sign."""
    torch.bitwise_right_shift(bits, places, out=out)
    out.bitwise_and_((1 << (64 - places)) - 1)


def _draw_with_seeds() -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    def forward_cpu(
        self: TopKTopPSampler,
        logits: Tensor,
        generators: dict[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return draw(logits, generators, k, p)

    TopKTopPSampler.forward_cpu = forward_cpu  # type: ignore[method-assign]


PATCHES = (
    Patch(
        "vllm-seeded-sampler",
        ("vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu",),
        {"vllm": VLLM},
        "vLLM fills the noise of [N, V] twice when all requests have seeds, one number at a time: 14 ms of an 85 ms "
        "decoding step of 64 requests and 4096 tokens",
        "tests/worker/upstream/test_vllm_sampler.py::test_a_request_depends_on_its_own_seed_alone",
        _draw_with_seeds,
        (Process.ENGINE_WORKER,),
        ("cpu",),
    ),
)
