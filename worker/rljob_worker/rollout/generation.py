"""The loop that drives vLLM's engine core: requests in, finished responses out as they finish.

It talks to the engine core below `vllm.LLM`, which would render prompts, copy sampling parameters and build output
objects for every request and token; with small models that is a quarter of the time. It also lets a caller take
responses while others still grow, and end a running generation between two steps.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rljob_worker.errors import JobError, StopRequested
from rljob_worker.types import FloatArray, Generation, GenerationRequest

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

OnFinished = Callable[[int, Generation], None]
_IDLE_STEPS = 100


@dataclass(slots=True)
class _Growing:
    index: int
    detokenizer: IncrementalDetokenizer | None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class StepLoop:
    """Runs requests on an engine core in this process.

    Args:
        core: vLLM's engine core client.
        tokenizer: a fast Hugging Face tokenizer for stop strings; None where there is none.
    """

    def __init__(self, core: EngineCoreClient, tokenizer: TokenizerLike | None) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._next_id = 0

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: VllmSamplingParams,
        aborted: threading.Event,
        on_finished: OnFinished | None = None,
    ) -> list[Generation]:
        """Generate all responses.

        Args:
            requests: N requests.
            params: for all of them, but for the seed.
            aborted: ends the generation at the next step when set.
            on_finished: called with (index, response) in this thread as each one finishes.

        Returns:
            N responses in the order of the requests.

        Raises:
            StopRequested: `aborted` was set; the engine is idle again.
            JobError: vLLM gave a request up, or a log-probability is not finite.
        """
        growing: dict[str, _Growing] = {}
        done: list[Generation | None] = [None] * len(requests)
        try:
            self._add(requests, params, growing)
            while growing:
                if aborted.is_set():
                    raise StopRequested("generation was ended before all responses were finished")
                for output in self._core.get_output().outputs:
                    state = growing.get(output.request_id)
                    if state is None:
                        continue
                    generation = self._extend(state, output)
                    if generation is not None:
                        del growing[output.request_id]
                        done[state.index] = generation
                        if on_finished is not None:
                            on_finished(state.index, generation)
        except BaseException:
            self._give_up(list(growing))
            raise
        generations = [generation for generation in done if generation is not None]
        assert len(generations) == len(requests)
        return generations

    def score(self, token_lists: Sequence[Sequence[int]], params: VllmSamplingParams) -> list[FloatArray]:
        """Log-probability of each token but the first given those before it: N arrays [length - 1] float32."""
        waiting: dict[str, int] = {}
        scores: dict[int, FloatArray] = {}
        try:
            for index, tokens in enumerate(token_lists):
                waiting[self._request([int(token) for token in tokens], params)] = index
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
        return [scores[index] for index in range(len(token_lists))]

    def _add(
        self, requests: Sequence[GenerationRequest], params: VllmSamplingParams, growing: dict[str, _Growing]
    ) -> None:
        prompt: list[int] = []
        source: tuple[int, ...] | None = None
        for index, request in enumerate(requests):
            if request.prompt_token_ids is not source:
                source = request.prompt_token_ids
                prompt = list(source)
            own = copy.copy(params)
            own.seed = request.seed
            detokenizer = None
            if own.stop:
                detokenizer = self._detokenizer(_core_request("", prompt, own))
            growing[self._request(prompt, own)] = _Growing(index, detokenizer)

    def _request(self, prompt: list[int], params: VllmSamplingParams) -> str:
        request_id = str(self._next_id)
        self._next_id += 1
        self._core.add_request(_core_request(request_id, prompt, params))
        return request_id

    def _detokenizer(self, request: EngineCoreRequest) -> IncrementalDetokenizer:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        if self._tokenizer is None:
            raise ValueError("stop: stop strings need a tokenizer, and the model folder has none")
        return IncrementalDetokenizer.from_new_request(self._tokenizer, request)

    def _extend(self, state: _Growing, output: EngineCoreOutput) -> Generation | None:
        """Take one step's tokens; the response when it is finished."""
        if output.new_token_ids:
            assert output.new_logprobs is not None
            state.token_ids += output.new_token_ids
            state.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
        reason = str(output.finish_reason) if output.finished else None
        stop_text = None
        if state.detokenizer is not None:
            stop_text = state.detokenizer.update(output.new_token_ids, reason == "stop")
            if stop_text is not None and reason is None:
                self._core.abort_requests([output.request_id])
            reason = "stop" if stop_text is not None else reason
        if reason is None:
            return None
        if reason not in ("stop", "length"):
            raise JobError(f"rollout: vLLM ended request {state.index} with {reason!r}")
        log_probs = np.array(state.log_probs, dtype=np.float32)
        if not np.isfinite(log_probs).all():
            raise JobError(f"rollout: request {state.index} has log-probabilities that are not finite")
        return Generation(np.array(state.token_ids, dtype=np.int64), log_probs, reason, stop_text)

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


def _core_request(request_id: str, prompt: list[int], params: VllmSamplingParams) -> EngineCoreRequest:
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
