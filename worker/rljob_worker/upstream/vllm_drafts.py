"""Speculative decoding: drafts that are right are kept, and no token depends on what was drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rljob_worker.upstream.patch import VLLM, Patch, Process, put
from rljob_worker.upstream.vllm_sampler import KeyedDraw
from rljob_worker.upstream.vllm_types import ModelRunner, Sampler

if TYPE_CHECKING:
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

_NO_TOKEN = -1
"""Mark of tokens that vLLM leaves out of a request."""


def kept_rows(tokens: Tensor, drafts: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Select the valid tokens of a step: those up to the first one that differs from its draft.

    Args:
        tokens: [D + N]: for each of N requests what was drawn after each of its drafts but the last, and after that.
        drafts: [D].
        counts: of the drafts of each request; D together.

    Returns:
        Rows of `tokens` [N, most drafts + 1], and [N, most drafts + 1] whether that token counts.
    """
    device = tokens.device
    number = torch.tensor(counts, dtype=torch.int64, device=device)
    place = torch.arange(max(counts) + 1, device=device)
    starts = (number + 1).cumsum(0) - number - 1
    there = place <= number[:, None]
    rows = torch.where(there, starts[:, None] + place, starts[:, None])
    # Drafts have no place for what comes after the last of them.
    before = (number.cumsum(0) - number)[:, None] + place[:-1]
    drafted = drafts[before.clamp(max=len(drafts) - 1)]
    right = (tokens[rows[:, :-1]] == drafted) & there[:, 1:]
    return rows, torch.cat([there[:, :1], right.to(torch.int64).cumprod(1).bool()], dim=1)


class KeyedVerification:
    """Takes the place of `RejectionSampler.forward` in one worker.

    Every place gets the token that it would have got without a draft: by the same sampler, with the noise of its own
    position. A draft is right where it is that token. Of drafts without probabilities, such as n-grams, this
    accepts as many as rejection sampling does (Leviathan, Kalman and Matias 2023): a draft x with probability p(x).

    Args:
        sampler: vLLM's.
        draw: what it draws with.
    """

    def __init__(self, sampler: Sampler, draw: KeyedDraw) -> None:
        self._sampler = sampler
        self._draw = draw
        self._proposed = self._accepted = 0

    def __call__(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Tokens [N, most drafts + 1] int32, -1 where there is none, with their log-probabilities.

        Raises:
            RuntimeError: drafts come with probabilities, which this does not use.
        """
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        if draft_probs is not None:
            raise RuntimeError("drafts with probabilities are not verified here")
        counts = metadata.num_draft_tokens
        with self._draw.after_drafts(counts):
            drawn = self._sampler(logits=logits, sampling_metadata=_of_rows(sampling_metadata, counts))
        tokens = drawn.sampled_token_ids.view(-1)
        rows, kept = kept_rows(tokens, metadata.draft_token_ids, counts)
        self._proposed += sum(counts)
        self._accepted += int(kept[:, 1:].sum())
        log_probs = None
        if drawn.logprobs_tensors is not None:
            ids, values, ranks, _ = drawn.logprobs_tensors
            chosen = rows.view(-1)
            log_probs = LogprobsTensors(ids[chosen], values[chosen], ranks[chosen])
        return SamplerOutput(torch.where(kept, tokens[rows], _NO_TOKEN), log_probs)

    def take_counts(self) -> tuple[int, int]:
        """Drafts that were proposed and accepted since the last time."""
        counts = self._proposed, self._accepted
        self._proposed = self._accepted = 0
        return counts


def _of_rows(metadata: SamplingMetadata, counts: Sequence[int]) -> SamplingMetadata:
    """The requests' parameters for each of their rows."""

    def repeated(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.repeat_interleave(times.to(values.device))

    times = torch.tensor(counts) + 1
    request_of = [request for request, count in enumerate(counts) for _ in range(count + 1)]
    words, said = metadata.bad_words_token_ids, metadata.output_token_ids
    return replace(
        metadata,
        temperature=repeated(metadata.temperature),
        top_p=repeated(metadata.top_p),
        top_k=repeated(metadata.top_k),
        # Words of one token (`engine.sampling`): what stands before them does not matter, drafts neither.
        bad_words_token_ids={row: words[request] for row, request in enumerate(request_of) if request in words},
        output_token_ids=[said[request] for request in request_of] if words else said,
    )


def verify_by_drawing(model_runner: ModelRunner, draw: KeyedDraw) -> KeyedVerification | None:
    """Have a worker verify drafts with its sampler; None where it makes none."""
    part = getattr(model_runner, "rejection_sampler", None)
    if part is None:
        return None
    verification = KeyedVerification(model_runner.sampler, draw)
    put(part, forward=verification)
    return verification


def _accept_precision() -> None:
    from vllm.utils import cpu_triton_utils

    stand_in = cpu_triton_utils.sample_recovered_tokens_kernel
    original: Callable[..., None] = stand_in.func

    def kernel(*args: object, USE_FP64_GUMBEL: bool = False, **kwargs: object) -> None:
        original(*args, **kwargs)

    put(stand_in, func=kernel)


PATCHES = (
    Patch(
        "vllm-keyed-verification",
        ("RejectionSampler.forward",),
        {"vllm": VLLM},
        "vLLM accepts a draft, and samples in the place of a refused one, with random numbers of its own: a response "
        "would depend on what was drafted, and could not be gone on with elsewhere",
        "tests/worker/engine/test_speculation.py::test_drafts_change_no_token",
        verify_by_drawing,
        (Process.ENGINE_WORKER,),
        ("cpu", "cuda"),
        scoped=True,
    ),
    Patch(
        "vllm-cpu-recovered-tokens",
        ("vllm.utils.cpu_triton_utils.sample_recovered_tokens_kernel.func",),
        {"vllm": VLLM},
        "the trial run of an engine that makes drafts ends with a TypeError on CPU: the stand-in of a Triton kernel "
        "does not know the argument USE_FP64_GUMBEL",
        "tests/worker/engine/test_speculation.py::test_drafts_change_no_token",
        _accept_precision,
        (Process.ENGINE_WORKER,),
        ("cpu",),
    ),
)
