"""The loop that drives vLLM's engine core: requests in, finished responses out as they finish.

It talks to the engine core below `vllm.LLM`, which would render prompts, copy sampling parameters and build output
objects for every request and token; with small models that is a quarter of the time. It also lets a caller take
responses while others still grow, and interrupt or end them between two steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rljob_worker.engine.pictures import PictureFeatures
from rljob_worker.errors import JobError
from rljob_worker.types import ExpertArray, FloatArray, Generation, GenerationRequest, IntArray, Picture
from rljob_worker.upstream.switches import SEED

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    from rljob_worker.engine.pictures import Features

_IDLE_STEPS = 100


@dataclass(slots=True)
class _Growing:
    index: int
    detokenizer: IncrementalDetokenizer | None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    experts: list[ExpertArray] = field(default_factory=list)
    """Experts of the prompt, then of each token that was computed after it."""

    def generation(self, reason: str = "", stop_text: str | None = None) -> Generation:
        log_probs = np.array(self.log_probs, dtype=np.float32)
        if not np.isfinite(log_probs).all():
            raise JobError(f"rollout: request {self.index} has log-probabilities that are not finite")
        experts = np.concatenate(self.experts) if self.experts else None
        return Generation(np.array(self.token_ids, dtype=np.int64), log_probs, reason, stop_text, experts)


class StepLoop:
    """Runs requests on an engine core in this process, step by step.

    Args:
        core: vLLM's engine core client.
        tokenizer: a fast Hugging Face tokenizer for stop strings; None where there is none.
        moe_layers: the layers whose experts are returned with each response; None: no experts are.
        adapter: what all requests are computed with; None: with the model's weights alone.
        pictures: makes features of them; None: the model takes none.
    """

    def __init__(
        self,
        core: EngineCoreClient,
        tokenizer: TokenizerLike | None,
        moe_layers: IntArray | None = None,
        adapter: LoRARequest | None = None,
        pictures: PictureFeatures | None = None,
    ) -> None:
        self._core = core
        self._pictures = pictures
        self._adapter = adapter
        self._tokenizer = tokenizer
        self._moe_layers = moe_layers
        self._next_id = 0
        self._growing: dict[str, _Growing] = {}

    def __len__(self) -> int:
        """Requests that still grow."""
        return len(self._growing)

    def add(self, first: int, requests: Sequence[GenerationRequest], params: VllmSamplingParams) -> None:
        """Let requests grow.

        Args:
            first: index of the first of them in what `step` returns; the others follow.
            requests: N requests.
            params: for all of them, but for the seed and a request's own limit; `max_tokens` counts what was
                sampled before.
        """
        prompt: list[int] = []
        source: tuple[int, ...] | None = None
        features: Features = None
        for index, request in enumerate(requests, first):
            if request.prompt_token_ids is not source:
                source = request.prompt_token_ids
                prompt = list(source)
                features = self._features(prompt, request.pictures)
            own = copy.copy(params)
            own.extra_args = {SEED: request.seed}
            tokens = prompt
            assert params.max_tokens is not None
            own.max_tokens = request.limit(params.max_tokens) - len(request.sampled_token_ids)
            if request.sampled_token_ids:
                tokens = [*prompt, *request.sampled_token_ids]
            detokenizer = None
            if own.stop:
                detokenizer = self._detokenizer(_core_request("", prompt, own))
                # A stop string may begin in what was sampled before.
                detokenizer.update(list(request.sampled_token_ids), False)
            self._growing[self._request(tokens, own, features)] = _Growing(index, detokenizer)

    def step(self) -> list[tuple[int, Generation]]:
        """One step of the engine; what finished in it, with its index.

        Raises:
            JobError: vLLM gave a request up, or a log-probability is not finite.
        """
        finished = []
        for output in self._core.get_output().outputs:
            state = self._growing.get(output.request_id)
            if state is None:
                continue
            generation = self._extend(state, output)
            if generation is not None:
                del self._growing[output.request_id]
                finished.append((state.index, generation))
        return finished

    def interrupt(self) -> None:
        """Between two steps: drop the KV cache, that of growing requests too; the next step computes it anew."""
        self._core.reset_prefix_cache(reset_running_requests=True)
        self._core.reset_encoder_cache()

    def take_back(self) -> list[tuple[int, Generation]]:
        """End what still grows, and what was generated of it, by index; the engine is idle then."""
        taken = sorted(((state.index, state.generation()) for state in self._growing.values()), key=lambda one: one[0])
        self.give_up()
        return taken

    def give_up(self) -> None:
        """Forget what still grows."""
        names = list(self._growing)
        self._growing.clear()
        self._give_up(names)

    def score(self, requests: Sequence[GenerationRequest], params: VllmSamplingParams) -> list[FloatArray]:
        """Log-probability of each prompt's tokens but the first given those before: N arrays [length - 1] float32."""
        waiting: dict[str, int] = {}
        scores: dict[int, FloatArray] = {}
        try:
            for index, request in enumerate(requests):
                tokens = list(request.prompt_token_ids)
                waiting[self._request(tokens, params, self._features(tokens, request.pictures))] = index
            while waiting:
                for output in self._core.get_output().outputs:
                    if output.new_prompt_logprobs_tensors is not None:
                        values = output.new_prompt_logprobs_tensors.logprobs
                        scores[waiting[output.request_id]] = values[:, 0].numpy().astype(np.float32)
                    if output.finished:
                        del waiting[output.request_id]
        except BaseException:
            self._give_up(list(waiting))
            raise
        return [scores[index] for index in range(len(requests))]

    def _request(self, prompt: list[int], params: VllmSamplingParams, features: Features = None) -> str:
        request_id = str(self._next_id)
        self._next_id += 1
        self._core.add_request(_core_request(request_id, prompt, params, self._adapter, features))
        return request_id

    def _features(self, prompt: list[int], pictures: Sequence[Picture]) -> Features:
        if not pictures:
            return None
        if self._pictures is None:
            raise ValueError("a request has pictures, and the engine's model takes none")
        return self._pictures.of(prompt, pictures)

    def _detokenizer(self, request: EngineCoreRequest) -> IncrementalDetokenizer:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        if self._tokenizer is None:
            raise ValueError("stop: stop strings need a tokenizer, and the model folder has none")
        return IncrementalDetokenizer.from_new_request(self._tokenizer, request)

    def _extend(self, state: _Growing, output: EngineCoreOutput) -> Generation | None:
        """Take one step's tokens; the response when it is finished."""
        tokens = output.new_token_ids
        reason = str(output.finish_reason) if output.finished else None
        stop_text = None
        if state.detokenizer is not None:
            tokens, stop_text = _until_stop(state.detokenizer, tokens, reason == "stop")
            if stop_text is not None and reason is None:
                self._core.abort_requests([output.request_id])
            reason = "stop" if stop_text is not None else reason
        if tokens:
            assert output.new_logprobs is not None
            state.token_ids += tokens
            state.log_probs += output.new_logprobs.logprobs[: len(tokens), 0].tolist()
            if self._moe_layers is not None:
                state.experts.append(self._experts(state, output, len(tokens)))
        if reason is None:
            return None
        if reason not in ("stop", "length"):
            raise JobError(f"rollout: vLLM ended request {state.index} with {reason!r}")
        return state.generation(reason, stop_text)

    def _experts(self, state: _Growing, output: EngineCoreOutput, tokens: int) -> ExpertArray:
        """Experts of the tokens computed since the last time: the prompt, later those before each of the new tokens.

        Raises:
            JobError: vLLM returned none, or the zeros of a path on which it does not look at the experts.
        """
        assert self._moe_layers is not None
        if output.routed_experts is None:
            raise JobError(f"rollout: vLLM returned no experts for request {state.index} (rollout.routerReplay)")
        experts: ExpertArray = output.routed_experts[:, self._moe_layers]
        if state.experts:
            # Guesses after the end of a stop string are computed too.
            experts = experts[:tokens]
        if experts.shape[-1] > 1 and (experts[..., 0] == experts[..., 1]).any():
            raise JobError(f"rollout: vLLM returned an expert twice for a token of request {state.index}")
        return experts

    def _give_up(self, request_ids: list[str]) -> None:
        """Abort requests and run the engine until it has forgotten them."""
        self._core.abort_requests(request_ids)
        self.drain()

    def drain(self) -> None:
        """Step until the scheduler holds no request, finished ones included; RuntimeError after too many."""
        scheduler = self._core.engine_core.scheduler  # type: ignore[attr-defined]
        for _ in range(_IDLE_STEPS):
            if not scheduler.has_requests():
                return
            self._core.get_output()
        raise RuntimeError(f"engine: the scheduler still holds requests after {_IDLE_STEPS} steps")


def _until_stop(detokenizer: IncrementalDetokenizer, tokens: list[int], ended: bool) -> tuple[list[int], str | None]:
    """A step's tokens up to the one that completes a stop string, and that string: several can come in one step."""
    for count, token in enumerate(tokens, 1):
        stop_text = detokenizer.update([token], ended and count == len(tokens))
        if stop_text is not None:
            return tokens[:count], stop_text
    return tokens, None


def _core_request(
    request_id: str,
    prompt: list[int],
    params: VllmSamplingParams,
    adapter: LoRARequest | None = None,
    features: Features = None,
) -> EngineCoreRequest:
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=features,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=adapter,
        cache_salt=None,
        data_parallel_rank=None,
    )
