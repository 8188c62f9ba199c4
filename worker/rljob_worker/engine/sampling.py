"""From RLJob's sampling parameters to vLLM's, and checks of what cannot be sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rljob_api.spec.rollout import MIN_TEMPERATURE
from rljob_worker.types import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams


def vllm_sampling(
    sampling: SamplingParams, generation_config: Mapping[str, object], end_token: int | None
) -> VllmSamplingParams:
    """vLLM's parameters but for the seed.

    Args:
        sampling: what the driver asks for.
        generation_config: the model's generation config, whose end tokens end a response too.
        end_token: the tokenizer's end token.

    Raises:
        ValueError: a temperature that vLLM would silently raise, which the trainer's transform would not know of.
    """
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"temperature: {sampling.temperature} is below what vLLM samples with; use 0 (greedy) or at least "
            f"{MIN_TEMPERATURE}"
        )
    params = VllmSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        detokenize=bool(sampling.stop),
        # A stop string may be the text of a special token.
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    params.update_from_generation_config(dict(generation_config), end_token)
    if sampling.forbidden:
        # Words of one token: vLLM gives these -inf before its filters. Its own field is filled from texts.
        params._bad_words_token_ids = [[token] for token in sampling.forbidden]
    return params


def scoring_params() -> VllmSamplingParams:
    """Log-probabilities of the prompt's tokens before any transform, past the prefix cache, which would hide some."""
    from vllm import SamplingParams as VllmSamplingParams

    return VllmSamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)


def check_requests(requests: Sequence[GenerationRequest], max_tokens: int, max_length: int, vocab_size: int) -> None:
    """ValueError for a prompt that is empty, too long for a whole response, or not in the vocabulary.

    And for a response that has all of its tokens already.

    Args:
        requests: each with the limit of its own, where it has one.
        max_tokens: of a response whose request has none.
        max_length: tokens of the engine's sequences.
        vocab_size: of the model.
    """
    checked: tuple[tuple[int, ...], int] | None = None
    for index, request in enumerate(requests):
        most = request.limit(max_tokens)
        if len(request.sampled_token_ids) >= most:
            raise ValueError(
                f"request {index}: {len(request.sampled_token_ids)} tokens were sampled before, and a response has at "
                f"most {most}: there is nothing to go on with"
            )
        prompt = request.prompt_token_ids
        if checked is not None and prompt is checked[0] and most == checked[1]:
            continue
        checked = prompt, most
        if not prompt:
            raise ValueError(f"request {index}: the prompt has no tokens")
        if len(prompt) + most > max_length:
            raise ValueError(
                f"request {index}: a prompt of {len(prompt)} tokens and a response of up to {most} exceed the "
                f"engine's {max_length} tokens; prompts may have at most {max_length - most}"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(
                f"request {index}: token ids must be in [0, {vocab_size}), got {min(prompt)} to {max(prompt)}"
            )
