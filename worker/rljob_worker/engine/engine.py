"""One vLLM engine of a job: generation, taking turns on its devices, and the weights it is at."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rljob_api import derived
from rljob_api.json_types import JsonObject
from rljob_api.spec import RLJobSpec
from rljob_worker.devices import check_profile, get_device
from rljob_worker.devices.kinds import device_kind
from rljob_worker.devices.profiling import ProfileOrder, ProfileResult
from rljob_worker.engine.arguments import engine_arguments, max_sequences
from rljob_worker.engine.chunks import Chunk, in_chunks
from rljob_worker.engine.device_extension import DeviceWorkerExtension
from rljob_worker.engine.loaded_model import LoadedModel
from rljob_worker.engine.profiler import EngineProfiler
from rljob_worker.engine.reports import DraftCounts, EngineSlept, EngineStarted, EngineWoke, MemoryReading
from rljob_worker.engine.serial_calls import SerialCalls
from rljob_worker.engine.service import OnFinished, OnIdle, RequestService
from rljob_worker.engine.states import EngineState
from rljob_worker.engine.vllm_process import VllmProcess
from rljob_worker.errors import JobError, UserError
from rljob_worker.host.reaper import Reaper, sweep_dead_engines
from rljob_worker.types import (
    Cut,
    EngineReport,
    FloatArray,
    Generation,
    GenerationRequest,
    IntArray,
    Picture,
    SamplingParams,
)
from rljob_worker.weightsync.engine import WeightSyncEngine
from rljob_worker.weightsync.route import Route
from rljob_worker.weightsync.vllm_extension import WeightLandingExtension

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

M = TypeVar("M")
A = TypeVar("A")


class Engine(SerialCalls):
    """A vLLM engine whose core runs in this process; with tensor parallelism its workers are child processes.

    The process needs the environment of `environment.engine_environment`. Calls are serialised; `abort`, `memory`,
    `profile`, `busy_seconds` and `weight_version` may come from any thread at any time.

    Args:
        spec: the job's spec as JSON, by alias.
        index: number of the engine in the job.
        model_folder: Hugging Face folder to start from; these weights are version 0.
        devices: the devices the engine spans, one for each tensor-parallel rank: their identities, or their numbers on
            this node; None where the workers find them out.
        folder: of this host's trainers and engines, for sockets; None: a temporary one.
        route: of the weights from the trainers; None: nobody sends any.

    Raises:
        UserError: the spec asks for a device or engine argument that cannot be had.
    """

    def __init__(
        self,
        spec: JsonObject,
        *,
        index: int,
        model_folder: str,
        devices: Sequence[str | int] | None,
        folder: str | None = None,
        route: Route | None = None,
    ) -> None:
        super().__init__("engine")
        self.spec = RLJobSpec.model_validate(spec)
        try:
            check_profile(self.spec.resources.profile.value)
        except ValueError as error:
            raise UserError(str(error)) from None
        if devices is not None and len(devices) != self.spec.rollout.tensor_parallel:
            raise UserError(
                f"engine-{index}: got {len(devices)} devices for spec.rollout.tensorParallel "
                f"{self.spec.rollout.tensor_parallel}"
            )
        self.index = index
        self.devices = None if devices is None else [_identity(self.spec, device) for device in devices]
        self.model_folder = model_folder
        self._folder, self._route = folder, route
        per_node = derived.engines_per_node(self.spec)
        self._number = index if route is not None and route.delivers else index % per_node
        """Number of this engine among those that the route serves."""
        self.weight_version: int | None = None
        """Version of the weights it holds; None while they are unusable."""
        self._model: LoadedModel | None = None
        self._profiler = EngineProfiler(
            lambda method, arguments: self._engine.collective_rpc(method, args=tuple(arguments)),
            self.spec.rollout.tensor_parallel,
        )
        self._weight_sync: WeightSyncEngine | None = None

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> EngineStarted:
        """Load the model and answer a warm-up request.

        Raises:
            UserError: vLLM refuses the engine arguments.
        """
        with self._operation("start"):
            self._process = VllmProcess(device_kind(self.spec.resources).name, self._folder)
            arguments = engine_arguments(self.spec, self.model_folder)
            sweep_dead_engines()
            # It would override the KV cache size of the spec, in whole GiB.
            os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
            self._reaper = Reaper()
            begin = time.perf_counter()
            self._process.import_vllm()
            imported = time.perf_counter()
            self._engine = _build(self._process, arguments)
            sees = "limit_mm_per_prompt" in arguments
            model = LoadedModel(self._engine, self.spec, Path(self.model_folder), self._profiler, sees=sees)
            self._model = model
            self._sleep_controller = self._process.platform.sleep_controller()(self._engine, model.loop.drain)
            if self.spec.rollout.graph_mode:
                self._sleep_controller.check_graphs()
            if self.devices is None:
                self.devices = self._sleep_controller.devices()
            loaded = time.perf_counter()
            kv_cache_bytes = arguments.get("kv_cache_memory_bytes")
            model.warm_up()
            self._sleep_controller.after_warm_up()
            self._reaper.settled()
            self.weight_version = 0
            return EngineStarted(
                import_seconds=imported - begin,
                load_seconds=loaded - imported,
                warmup_seconds=time.perf_counter() - loaded,
                devices=tuple(self.devices),
                threads=int(os.environ.get("OMP_NUM_THREADS", 0)),
                max_model_length=model.max_length,
                max_sequences=max_sequences(self.spec),
                kv_cache_bytes=(
                    kv_cache_bytes if isinstance(kv_cache_bytes, int) else self._sleep_controller.kv_cache_bytes()
                ),
            )

    def shutdown(self, *, process_ends: bool = False) -> None:
        """End the workers and give everything back; idempotent. A running generation is aborted.

        Args:
            process_ends: this process ends next, and takes with it what is its own: vLLM would look through all objects
                of the process for what nobody needs, twice.
        """
        self.abort()
        with self._closing() as started:
            self.weight_version = None
            if self._weight_sync is not None:
                self._weight_sync.close()
            if started:
                if not process_ends or self.spec.rollout.tensor_parallel > 1:
                    self._engine.engine_core.shutdown()
                self._reaper.close()

    # --- generation ---------------------------------------------------------------------------

    def generate(
        self,
        requests: list[GenerationRequest],
        sampling: SamplingParams,
        version: int,
        on_finished: OnFinished | None = None,
        *,
        cut: Cut | None = None,
        more: bool = False,
        on_idle: OnIdle | None = None,
    ) -> list[Generation]:
        """Generate one response for each request, or go on with it where tokens were sampled before.

        Responses keep every generated token, those of a stop string included: they are what was sampled, and what
        the trainer has log-probabilities for. The same request (prompt, seed, sampling) gives the same tokens
        wherever it runs, as far as the kernels do: on CPU the log-probabilities of a request differ by rounding
        (1e-6 in fp32) when its neighbours in the batch change, and are bit-equal when they do not.

        Args:
            requests: N requests; those of one prompt side by side.
            sampling: for all of them.
            version: weights they must be generated with.
            on_finished: called with (key, response) as each one finishes, from this thread; at the end with those
                that were cut.
            cut: when to end although some still grow; None: when all are finished.
            more: further requests may come by `requests.submit` until `requests.close`; without `cut`.
            on_idle: called when it waits for them with nothing left to generate.

        Returns:
            Responses in the order of the requests; those that were cut have an empty finish reason.

        Raises:
            ValueError: a prompt is too long, empty or outside the vocabulary; two requests have one key; sampling
                parameters are not possible.
            JobError: the engine's weights are not at `version`, or vLLM gave up.
            StopRequested: `abort` was called.
        """
        with self._operation("generate"):
            if self.weight_version != version:
                raise JobError(
                    f"rollout: engine-{self.index} holds weights of version {self.weight_version}, not {version}"
                )
            model = self._loaded()
            idle = model.requests.idle_seconds
            generations = model.generate(requests, sampling, version, on_finished, cut=cut, more=more, on_idle=on_idle)
            # What it waited for requests was no work.
            self._busy -= model.requests.idle_seconds - idle
            return generations

    def stream(
        self,
        requests: list[GenerationRequest],
        sampling: SamplingParams,
        version: int,
        *,
        cut: Cut | None = None,
        more: bool = False,
    ) -> Iterator[Chunk]:
        """Yield the responses of `generate` as they finish, so that they are scored while others still grow."""
        return in_chunks(
            lambda finished, idle: self.generate(
                requests, sampling, version, finished, cut=cut, more=more, on_idle=idle
            )
        )

    def submit(self, requests: list[GenerationRequest], *, last: bool) -> bool:
        """Give the running generation more requests, of which nothing comes after the last; thread-safe.

        Returns:
            False where it was harvested, and does not take them.
        """
        taken = self.requests.submit(requests)
        if last:
            self.requests.close()
        return taken

    @property
    def requests(self) -> RequestService:
        """Requests that any thread may make of a running generation; RuntimeError before `start`."""
        return self._loaded().requests

    def score(
        self, token_lists: Sequence[IntArray], pictures: Sequence[Sequence[Picture]] | None = None
    ) -> list[FloatArray]:
        """Log-probability of each token but the first, given those before it, at temperature 1 without truncation.

        Args:
            token_lists: N sequences of at least 2 tokens, each shorter than the engine's length.
            pictures: of each; None: there are none.

        Returns:
            N arrays [length - 1] float32.
        """
        with self._operation("score"):
            return self._loaded().score(token_lists, pictures)

    def take_draft_counts(self) -> DraftCounts:
        """Guesses of speculative decoding since the last time."""
        model = self._loaded()
        taken, model.drafts = model.drafts, DraftCounts()
        return taken

    def harvest(self, version: int) -> None:
        """End generations with these weights or earlier ones at their next step, also those that begin yet; they return
        what they have."""
        if self._model is not None:
            self._model.requests.harvest_version(version)

    def abort(self) -> None:
        """End the running generation at its next step with StopRequested, or the next one when none runs."""
        if self._model is not None:
            self._model.requests.abort()

    def profile(self, order: ProfileOrder | None) -> list[ProfileResult]:
        """Profile the next generation, or no more; what became of earlier orders. Thread-safe."""
        self._profiler.ask(order)
        return self._profiler.results()

    # --- turns --------------------------------------------------------------------------------

    def sleep(self) -> EngineSlept:
        """Forget all cached prefixes and give back the KV cache, and the weights where the device can sleep."""
        with self._operation("sleep"):
            return self._sleep_controller.sleep()

    def wake_weights(self) -> EngineWoke:
        """Take the memory for the weights back, without content where they had left."""
        with self._operation("wake_weights"):
            return self._sleep_controller.wake_weights()

    def receive_weights(self, version: int, seconds: float) -> EngineReport:
        """Take a version of the weights from the trainers, verified; awake or with memory for them.

        Args:
            version: the version they send.
            seconds: deadline for all of it.

        Returns:
            The report of `weightsync.engine.WeightSyncEngine.update_weights`.

        Raises:
            WeightSyncError: it failed; the engine holds no usable weights until a later one succeeds.
        """
        with self._operation("receive_weights"):
            if self._weight_sync is None:
                if self._route is None:
                    raise RuntimeError(f"engine-{self.index}: was made without a route from trainers")
                self._weight_sync = WeightSyncEngine(self._land, route=self._route, engine=self._number)
            self.weight_version = None
            if self.state is EngineState.ACTIVE:
                # It did not sleep: what it remembers of prompts was computed with the weights before.
                self._sleep_controller.forget_prefixes()
            report = self._weight_sync.update_weights(version, seconds)
            self.weight_version = version
            return report

    def take_route(self, route: Route, number: int) -> None:
        """Take weights by another route from the next hand-over on, as this number among its engines."""
        if self._weight_sync is not None:
            self._weight_sync.close()
        self._weight_sync, self._route, self._number = None, route, number

    def wake_kv(self) -> EngineWoke:
        """Take the KV cache back, empty."""
        with self._operation("wake_kv"):
            return self._sleep_controller.wake_kv()

    def sleep_with_weights(self) -> None:
        """Sleep, with the weights on the host, and wake: a trial of a device, which no job makes."""
        with self._operation("generate"):
            self._sleep_controller.forget_prefixes()
            self._engine.sleep(level=1)
            self._sleep_controller.wake()

    def scale_weights(self, factor: float) -> None:
        """Multiply a projection of each layer where it lies, as new weights are written: another such trial."""
        with self._operation("generate"):
            self._engine.collective_rpc(DeviceWorkerExtension.rljob_scale_weights.__name__, args=(factor,))
            self._sleep_controller.forget_prefixes()

    def memory(self) -> MemoryReading:
        """Resident pages of this process and its tensor-parallel workers, and what the devices have free."""
        return self._sleep_controller.memory()

    # --- inside -------------------------------------------------------------------------------

    def _land(self, method: Callable[[WeightLandingExtension, M], A], message: M, seconds: float, /) -> Sequence[A]:
        answers: list[A] = self._engine.collective_rpc(method.__name__, timeout=seconds, args=(message,))
        return answers

    def _loaded(self) -> LoadedModel:
        if self._model is None:
            raise RuntimeError(f"engine-{self.index}: was not started")
        return self._model


def _identity(spec: RLJobSpec, device: str | int) -> str:
    return device if isinstance(device, str) else get_device(spec.resources.profile.value, device).identity()


def _build(process: VllmProcess, arguments: Mapping[str, object]) -> LLMEngine:
    try:
        parsed = process.parsed(arguments)
    except TypeError as error:
        raise UserError(f"spec.rollout.engineArgs: {error}") from error
    try:
        return process.build(parsed)
    except ValueError as error:
        raise UserError(
            f"spec.rollout: vLLM refuses these settings (here {_kv_cache_size(arguments)}, and data.maxPromptTokens "
            f"with maxResponseTokens gives sequences of {arguments['max_model_len']} tokens): {error}"
        ) from error


def _kv_cache_size(arguments: Mapping[str, object]) -> str:
    size = arguments.get("kv_cache_memory_bytes")
    return f"memoryFraction is {arguments['gpu_memory_utilization']}" if size is None else f"kvCacheBytes is {size}"
