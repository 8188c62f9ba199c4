"""Drawing tokens: noise that depends on a request's seed and the token's place alone, made in one pass for a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rljob_worker.upstream.patch import VLLM, Patch, Process, put
from rljob_worker.upstream.switches import SEED
from rljob_worker.upstream.vllm_types import ModelRunner

Truncate = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""Logits [N, V], top-k [N] and top-p [N], or None for either, to logits with -inf where they cut."""

_WEYL, _MIX_1, _MIX_2, _MIX_3 = -0x61C88647, -0x12A52B45, -0x53B3E4AF, 0x31848BAB
"""Golden ratio's Weyl step, and the factors of Wellons' `triple32` (github.com/skeeto/hash-prospector, bias 0.0209), as
signed integers: torch's int32 wraps as uint32 does."""


def draw(logits: Tensor, keys: Tensor, k: Tensor | None, p: Tensor | None, truncate: Truncate) -> tuple[Tensor, Tensor]:
    """Draw as vLLM's `TopKTopPSampler.forward` does with `logprobs_mode=processed_logprobs`, with keyed noise.

    Args:
        logits: [N, V] float32.
        keys: [N, 2] int32 of `noise_keys`.
        k: [N] or None.
        p: [N] or None.
        truncate: applies them.

    Returns:
        Tokens [N] int64 and log-probabilities [N, V] float32 of the logits after top-k and top-p.
    """
    log_probs = truncate(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
    # The token with the least q / p among independent exponential q is distributed as p.
    return log_probs.exp().div_(exponential_noise(keys, logits.shape[-1])).argmax(dim=-1), log_probs


def noise_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> Tensor:
    """Keys [N, 2] int32 of tokens at `positions` [N], counted from the prompt's first, of requests with `seeds` [N].

    SplitMix64 (Steele, Lea and Flood 2014), begun at a hash of the seed and read at the position: whatever became of
    the request before, its noise there is the same.
    """
    start = _split_mix(seeds, np.zeros_like(seeds))
    return torch.from_numpy(_split_mix(start, positions).view(np.int32).reshape(-1, 2).copy())


def _split_mix(state: npt.NDArray[np.uint64], number: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """[N]: outputs at places `number` of generators that began at `state`."""
    z = state + (number + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def exponential_noise(keys: Tensor, count: int) -> Tensor:
    """Standard exponential numbers [N, count] float32 from keys [N, 2] int32: row i depends on key i alone.

    32 bits and `>>`, which NPUs have; float64 and a loop over rows they have not, or slowly. The integers are equal on
    all devices; their logarithm differs in its last bit, as the logits do.
    """
    low, high = keys[:, :1], keys[:, 1:]
    bits = torch.arange(1, count + 1, dtype=torch.int32, device=keys.device).mul_(_WEYL) + low
    _fold(bits, 17).mul_(_MIX_1).bitwise_xor_(high)
    _fold(bits, 11).mul_(_MIX_2)
    _fold(bits, 15).mul_(_MIX_3)
    _fold(bits, 14)
    # 31 bits, in the middle of their interval. Small numbers, which win, keep all their digits; 1 is never reached.
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31 * (1 - 2.0**-24))
    return uniform.neg_().log1p_().neg_()


def _fold(bits: Tensor, places: int) -> Tensor:
    """`bits ^= bits >> places`, shifted logically: torch's own shift copies the sign."""
    return bits.bitwise_xor_((bits >> places).bitwise_and_((1 << (32 - places)) - 1))


class KeyedDraw:
    """Takes the place of `TopKTopPSampler.forward` in one worker.

    Args:
        model_runner: says which request each row is, and how long it is by now.
        truncate: the device's.
    """

    def __init__(self, model_runner: ModelRunner, truncate: Truncate) -> None:
        self._model_runner = model_runner
        self._truncate = truncate
        self._drafts: Sequence[int] = ()

    def __call__(
        self, logits: Tensor, _generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Tokens [N] and log-probabilities [N, V] of logits [N, V]."""
        return draw(logits, self._keys(len(logits)).to(logits.device, non_blocking=True), k, p, self._truncate)

    @contextmanager
    def after_drafts(self, counts: Sequence[int]) -> Iterator[None]:
        """Inside, each request has a row more than its `counts` of drafts: for the places after each of them, too."""
        self._drafts = counts
        try:
            yield
        finally:
            self._drafts = ()

    def _keys(self, rows: int) -> Tensor:
        batch, requests = self._model_runner.input_batch, self._model_runner.requests
        count, drafts = batch.num_reqs, self._drafts
        if count + sum(drafts) != rows:
            raise RuntimeError(f"sampler: {rows} rows of logits for {count} requests with {sum(drafts)} drafts")
        # Greedy requests need no seed: vLLM samples them along with the others, and drops what came out for them.
        seeds = np.array(
            [(requests[name].sampling_params.extra_args or {}).get(SEED, 0) for name in batch.req_ids[:count]],
            dtype=np.uint64,
        )
        positions = batch.num_tokens_no_spec[:count].astype(np.uint64)
        if drafts:
            of_request = np.array(drafts, dtype=np.int64) + 1
            after = np.arange(rows) - np.repeat(of_request.cumsum() - of_request, of_request)
            seeds, positions = np.repeat(seeds, of_request), np.repeat(positions, of_request) + after.astype(np.uint64)
        return noise_keys(seeds, positions)


def key_noise(model_runner: ModelRunner) -> KeyedDraw:
    """Have a worker's sampler draw by request and position."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    part = model_runner.sampler.topk_topp_sampler
    # vllm-ascend has its own.
    truncate = getattr(part, "apply_top_k_top_p", apply_top_k_top_p)
    draw_by_key = KeyedDraw(model_runner, truncate)
    put(part, forward=draw_by_key)
    return draw_by_key


PATCHES = (
    Patch(
        "vllm-keyed-noise",
        ("TopKTopPSampler.forward",),
        {"vllm": VLLM},
        "a generator of vLLM's starts anew where a response is continued elsewhere, so that its tokens are others; and "
        "it is asked row by row: up to 1,024 launches a token on npu, 14 ms of an 85 ms decoding step of 64 requests "
        "and 4096 tokens on CPU",
        "tests/worker/engine/test_rollout_engine.py::test_a_response_is_continued_to_the_same_bits",
        key_noise,
        (Process.ENGINE_WORKER,),
        scoped=True,
    ),
)
