"""The policy as an engine has loaded it: it generates, and scores what others generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from rljob_api.spec import RLJobSpec
from rljob_worker.engine.adapters import load_policy_adapter
from rljob_worker.engine.generation import StepLoop
from rljob_worker.engine.pictures import PictureFeatures
from rljob_worker.engine.profiler import EngineProfiler
from rljob_worker.engine.reports import DraftCounts
from rljob_worker.engine.sampling import check_requests, scoring_params, vllm_sampling
from rljob_worker.engine.service import OnFinished, OnIdle, RequestService
from rljob_worker.engine.worker_extension import WorkerExtension
from rljob_worker.models.facts import ModelFacts
from rljob_worker.models.pictures import PictureFacts
from rljob_worker.types import Cut, FloatArray, Generation, GenerationRequest, IntArray, Picture, SamplingParams

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.engine.llm_engine import LLMEngine


class LoadedModel:
    """The model in vLLM's engine core, with what belongs to its folder: tokenizer, adapters, features of pictures.

    Args:
        llm: vLLM's engine.
        spec: the job.
        folder: Hugging Face folder that it was loaded from.
        profiler: of its workers.
        sees: whether requests have pictures.

    Attributes:
        loop: runs its engine core.
        requests: those of the running generation, for any thread.
        max_length: tokens of the longest sequence.
        drafts: guesses of speculative decoding that nobody has taken yet.

    Raises:
        UserError: vLLM does not compute with the job's adapters.
    """

    def __init__(self, llm: LLMEngine, spec: RLJobSpec, folder: Path, profiler: EngineProfiler, *, sees: bool) -> None:
        self._llm, self._profiler = llm, profiler
        tokenizer = _load_tokenizer(folder)
        adapter = load_policy_adapter(llm, spec, folder)
        pictures = PictureFeatures(PictureFacts.of_folder(folder)) if sees else None
        returned = np.flatnonzero(ModelFacts.from_hf(folder).moe_layers) if spec.rollout.router_replay else None
        self.loop = StepLoop(llm.engine_core, tokenizer, returned, adapter, pictures)
        self.requests = RequestService(self.loop)
        config = llm.model_config
        self.max_length: int = config.max_model_len
        self._vocab_size: int = config.get_vocab_size()
        self._generation_config: Mapping[str, object] = config.try_get_generation_config()
        self._end_token: int | None = getattr(tokenizer, "eos_token_id", None)
        self._speculates = spec.rollout.speculative is not None
        self.drafts = DraftCounts()

    def warm_up(self) -> None:
        """Answer two requests of one token."""
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        self.requests.run([GenerationRequest((0,), 0)] * 2, self._params(sampling))

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParams,
        version: int,
        on_finished: OnFinished | None,
        *,
        cut: Cut | None,
        more: bool,
        on_idle: OnIdle | None,
    ) -> list[Generation]:
        """See `Engine.generate`; the weights are at `version`."""

        def check_all(requests: Sequence[GenerationRequest]) -> None:
            check_requests(requests, sampling.max_tokens, self.max_length, self._vocab_size)

        check_all(requests)
        params = self._params(sampling)
        with self._profiler.work():
            generations = self.requests.run(
                requests,
                params,
                on_finished,
                cut=cut,
                more=check_all if more else None,
                on_idle=on_idle,
                version=version,
            )
        if self._speculates:
            # All ranks guess and verify the same.
            self.drafts += DraftCounts(*self._llm.collective_rpc(WorkerExtension.rljob_take_draft_counts.__name__)[0])
        return generations

    def score(self, token_lists: Sequence[IntArray], pictures: Sequence[Sequence[Picture]] | None) -> list[FloatArray]:
        """See `Engine.score`."""
        seen = pictures or [()] * len(token_lists)
        requests = [
            GenerationRequest(tuple(int(token) for token in tokens), 0, pictures=tuple(own))
            for tokens, own in zip(token_lists, seen, strict=True)
        ]
        check_requests(requests, 1, self.max_length, self._vocab_size)
        return self.loop.score(requests, scoring_params())

    def _params(self, sampling: SamplingParams) -> VllmSamplingParams:
        return vllm_sampling(sampling, self._generation_config, self._end_token)


def _load_tokenizer(folder: Path) -> TokenizerLike | None:
    """The folder's tokenizer; None where it has no tokenizer files."""
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    # vLLM's protocol asks for more than transformers' types declare.
    return cast("TokenizerLike", AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
