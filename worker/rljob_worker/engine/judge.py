"""A vLLM engine that judges texts by a score or in words, on devices that others use too or on some of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rljob_api import derived
from rljob_api.json_types import JsonObject
from rljob_api.spec import JudgeKind, JudgeSpec, Precision, RLJobSpec
from rljob_worker.devices import check_profile, get_device
from rljob_worker.devices.kinds import device_kind
from rljob_worker.engine.platforms import engine_platform
from rljob_worker.engine.reports import EngineSlept, EngineWoke
from rljob_worker.engine.serial_calls import SerialCalls
from rljob_worker.engine.vllm_process import VllmProcess
from rljob_worker.errors import StopRequested, UserError
from rljob_worker.models.judge_model import Said

if TYPE_CHECKING:
    from vllm import PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    Params: TypeAlias = PoolingParams | SamplingParams
    Output: TypeAlias = PoolingRequestOutput | RequestOutput

_MOST_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class JudgeStarted:
    """A judge that scored its warm-up text."""

    device: str
    """Identity of its device on its node."""


class JudgeEngine(SerialCalls):
    """A judge's model on one device. Nobody sends it weights: while it sleeps they are in host memory.

    The process needs the environment of `environment.engine_environment`. Calls are serialised; `abort` and
    `busy_seconds` may come from any thread at any time.

    Args:
        spec: the job's spec as JSON, by alias; one of its judges has a model.
        model_folder: Hugging Face folder of it, with its tokenizer.
        max_tokens: of the longest text.
        device: its device's number on this node; None where vLLM finds it out.
        folder: of this host's processes, for sockets; None: a temporary one.
    """

    def __init__(
        self,
        spec: JsonObject,
        *,
        model_folder: str,
        max_tokens: int,
        device: int | None = None,
        folder: str | None = None,
    ) -> None:
        super().__init__("judge")
        self.spec = RLJobSpec.model_validate(spec)
        try:
            check_profile(self.spec.resources.profile.value)
        except ValueError as error:
            raise UserError(str(error)) from None
        self._model_folder, self._max_tokens = model_folder, max_tokens
        self._device, self._folder = device, folder
        self._aborted = threading.Event()

    def start(self) -> JudgeStarted:
        """Load the model and score a text; UserError where vLLM refuses the model or its settings."""
        with self._operation("start"):
            self._process = VllmProcess(device_kind(self.spec.resources).name, self._folder)
            self._process.import_vllm()
            self._engine = _build(self._process, self.spec, self._model_folder, self._max_tokens)
            self._sleep_controller = self._process.platform.sleep_controller()(
                self._engine, self._drain, keeps_weights=True
            )
            if self._device is None:
                (identity,) = self._sleep_controller.devices()
            else:
                identity = get_device(self.spec.resources.profile.value, self._device).identity()
            self._warm_up()
            self._sleep_controller.after_warm_up()
            return JudgeStarted(identity)

    def score(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Score of each text, as the model's only label has it: no activation is applied to it.

        The same texts in the same order give the same bits.

        Args:
            texts: N lists of at least one token, none longer than `max_tokens`.

        Returns:
            N numbers; one that the model makes of numbers that are not finite is not finite either.

        Raises:
            ValueError: a text is empty or too long.
            StopRequested: `abort` was called.
        """
        with self._operation("score"):
            self._check(texts, self._max_tokens)
            return self._scores(texts)

    def write(self, texts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Said]:
        """Answer of a model that writes to each text, of at most the judge's `maxTokens` tokens; bits as of `score`.

        Args:
            texts: N prompts of at least one token, none longer than `max_tokens` without those of an answer.
            seeds: of each.

        Raises:
            ValueError: a text is empty or too long.
            StopRequested: `abort` was called.
        """
        judge = derived.judge_model(self.spec)
        assert judge is not None
        with self._operation("score"):
            self._check(texts, self._max_tokens - judge.max_tokens)
            return self._written(texts, seeds, judge.max_tokens, judge.temperature)

    def sleep(self) -> EngineSlept:
        """Give the caches back, and where the device can sleep the weights, of which the host keeps a copy."""
        with self._operation("sleep"):
            return self._sleep_controller.sleep()

    def wake(self) -> EngineWoke:
        """Take all of it back, the weights with their content."""
        with self._operation("wake"):
            return self._sleep_controller.wake()

    def shutdown(self, *, process_ends: bool = False) -> None:
        """Give everything back; idempotent. A running call is aborted.

        Args:
            process_ends: this process ends next, and takes with it what is its own.
        """
        self.abort()
        with self._closing() as started:
            if started and not process_ends:
                self._engine.engine_core.shutdown()

    def abort(self) -> None:
        """End the running `score` at its next step with StopRequested, or the next one when none runs."""
        self._aborted.set()

    def _warm_up(self) -> None:
        judge = derived.judge_model(self.spec)
        if judge is not None and judge.kind is JudgeKind.SCORE:
            self._scores([(0, 0)])
        else:
            self._written([(0, 0)], [0], 2, 0.0)

    def _check(self, texts: Sequence[Sequence[int]], most: int) -> None:
        for number, text in enumerate(texts):
            if not 0 < len(text) <= most:
                raise ValueError(f"judge: text {number} has {len(text)} tokens; 1 to {most} are taken")

    def _scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        from vllm import PoolingParams, PoolingRequestOutput

        params = PoolingParams(task="classify", use_activation=False)
        found = []
        for output in self._answers(texts, [params] * len(texts)):
            assert isinstance(output, PoolingRequestOutput)
            found.append(float(output.outputs.data.item()))
        return found

    def _written(
        self, texts: Sequence[Sequence[int]], seeds: Sequence[int], max_tokens: int, temperature: float
    ) -> list[Said]:
        from vllm import RequestOutput, SamplingParams

        params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed) for seed in seeds]
        found = []
        for output in self._answers(texts, params):
            assert isinstance(output, RequestOutput)
            found.append(Said(output.outputs[0].text, output.outputs[0].finish_reason == "length"))
        return found

    def _answers(self, texts: Sequence[Sequence[int]], params: Sequence[Params]) -> list[Output]:
        """vLLM's last output for each text."""
        for number, (text, own) in enumerate(zip(texts, params, strict=True)):
            self._engine.add_request(str(number), {"prompt_token_ids": list(text)}, own)
        found: dict[int, Output] = {}
        while self._engine.has_unfinished_requests():
            if self._aborted.is_set():
                self._engine.abort_request([str(number) for number in range(len(texts)) if number not in found])
                raise StopRequested
            for output in self._engine.step():
                if output.finished:
                    found[int(output.request_id)] = output
        return [found[number] for number in range(len(texts))]

    def _drain(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()


def judge_arguments(spec: RLJobSpec, judge: JudgeSpec, model_folder: str, max_tokens: int) -> dict[str, object]:
    """Keyword arguments of vLLM's EngineArgs for a judge's model on the job's kind of device."""
    assert judge.model is not None
    own = {"memory_fraction": judge.model.memory_fraction, "kv_cache_bytes": judge.model.kv_cache_bytes}
    rollout = spec.rollout.model_copy(update=own | {"engine_args": {}})
    arguments = engine_platform(device_kind(spec.resources).name).arguments(
        spec.model_copy(update={"rollout": rollout})
    )
    return arguments | {
        "model": model_folder,
        "runner": "pooling" if judge.kind is JudgeKind.SCORE else "generate",
        "trust_remote_code": False,
        "dtype": "bfloat16" if spec.training.precision is Precision.BF16 else "float32",
        "seed": spec.seed & 0xFFFFFFFF,
        "enforce_eager": True,
        # A score is of the whole text; questions in words begin alike.
        "enable_prefix_caching": judge.kind is JudgeKind.CHAT,
        "max_num_seqs": _MOST_SEQUENCES,
        "max_model_len": max_tokens,
        "disable_log_stats": True,
    }


def _build(process: VllmProcess, spec: RLJobSpec, model_folder: str, max_tokens: int) -> LLMEngine:
    judge = derived.judge_model(spec)
    assert judge is not None
    try:
        arguments = judge_arguments(spec, judge, model_folder, max_tokens)
        return process.build(process.parsed(arguments))
    except ValueError as error:
        raise UserError(
            f"spec.judges: {judge.name}: vLLM refuses its model or settings (texts of up to {max_tokens} tokens, "
            f"memoryFraction, kvCacheBytes): {error}"
        ) from error
