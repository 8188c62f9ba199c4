"""Host work of the verified weight sync, between trainer and engine on a device whose copies and sums cost nothing.

`weight_sync.py --null` runs it. Tensors are those of Qwen3-4B by number, and tiny; slots are the device's own, as on an
accelerator. What a sync takes then is Python, messages and calls: the same on any device.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from figures import Figure

from rljob_worker.devices.checksum import BegunChecksum
from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.host.staging_slots import SHARED_MEMORY
from rljob_worker.types import EngineReport
from rljob_worker.weightsync.vllm_extension import WeightLandingExtension

DEADLINE = 60.0
BUCKET_LIMIT, TENSORS_LIMIT = 250.0, 1.1
_SUMS = BegunChecksum(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.uint8), 8)


@dataclass(frozen=True)
class Shape:
    """A Qwen3 of tiny tensors."""

    layers: int
    hidden: int
    ffn: int
    vocabulary: int

    HEADS, GROUPS, HEAD_DIM = 4, 2, 32

    def config(self) -> dict[str, object]:
        """The model's config as Hugging Face has it."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.HEADS,
            "num_key_value_heads": self.GROUPS,
            "head_dim": self.HEAD_DIM,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 256,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """In Megatron's names and shapes."""
        hidden, heads = self.hidden, self.HEADS * self.HEAD_DIM
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attention.linear_qkv.weight": (heads + 2 * self.GROUPS * self.HEAD_DIM, hidden),
            "self_attention.q_layernorm.weight": (self.HEAD_DIM,),
            "self_attention.k_layernorm.weight": (self.HEAD_DIM,),
            "self_attention.linear_proj.weight": (hidden, heads),
            "pre_mlp_layernorm.weight": (hidden,),
            "mlp.linear_fc1.weight": (2 * self.ffn, hidden),
            "mlp.linear_fc2.weight": (hidden, self.ffn),
        }
        shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (self.vocabulary, hidden)}
        shapes |= {f"decoder.layers.{i}.{name}": shape for i in range(self.layers) for name, shape in layer.items()}
        shapes["decoder.final_layernorm.weight"] = (hidden,)
        return {name: (torch.randn(shape) * 0.02).to(torch.bfloat16) for name, shape in shapes.items()}


QWEN3_4B = Shape(layers=36, hidden=64, ffn=128, vocabulary=512)
FOUR_TIMES = Shape(layers=144, hidden=32, ffn=64, vocabulary=512)
"""A fourth of the other's bytes a layer."""
BUCKETS = 37
"""About as many as Qwen3-4B has of 256 MiB."""


class NoSum:
    """Checksum of nothing."""

    def add(self, tensor: torch.Tensor) -> None: ...

    def begin(self) -> BegunChecksum:
        return _SUMS


class NullDevice(CpuDevice):
    """Has memory of its own, sums nothing, and copies next to nothing."""

    own_memory = True

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self._names: dict[int, str] = {}

    def staging(self, nbytes: int) -> torch.Tensor:
        """Memory that `share` can export."""
        descriptor, name = tempfile.mkstemp(prefix="rljob-null-device-", dir=SHARED_MEMORY)
        os.close(descriptor)
        tensor = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
        self._names[tensor.data_ptr()] = name
        return tensor

    def share(self, tensor: torch.Tensor) -> bytes:
        return f"{tensor.nbytes} {self._names[tensor.data_ptr()]}".encode()

    def open_shared(self, message: bytes) -> torch.Tensor:
        nbytes, name = message.decode().split(" ", 1)
        return torch.from_file(name, shared=True, size=int(nbytes), dtype=torch.uint8)

    def begin_checksum(self, tensor: torch.Tensor) -> Any:
        return _SUMS

    def sum_of(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Any:
        return NoSum()

    def growing_sum(self) -> Any:
        return NoSum()

    def end_checksums(self, begun: Sequence[Any]) -> list[int]:
        return [0] * len(begun)

    def remove_files(self) -> None:
        """Remove the files that were made here."""
        for name in self._names.values():
            Path(name).unlink(missing_ok=True)


class NullDeviceExtension(WeightLandingExtension):
    """In vLLM's worker."""

    def rljob_device(self) -> NullDevice:
        return NullDevice(self.rank)


def engine_process(folder: str, model: str, pipe: Connection) -> None:
    """A real vLLM engine that takes each version announced to it."""
    import vllm._custom_ops as ops
    from vllm import LLM

    from rljob_worker.weightsync.engine import WeightSyncEngine
    from rljob_worker.weightsync.routes import HostRoute

    torch.set_num_threads(1)
    ops._supports_onednn = False  # packed weights are work of the CPU's alone
    llm = LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=128,
        enforce_eager=True,
        max_num_seqs=8,
        worker_extension_cls="null_device.NullDeviceExtension",
        disable_log_stats=True,
    )

    def land(method: Callable[..., Any], message: Any, seconds: float) -> list[Any]:
        return llm.collective_rpc(method.__name__, timeout=seconds, args=(message,))

    receiver = WeightSyncEngine(land, route=HostRoute(folder), engine=0)
    pipe.send("up")
    while (version := pipe.recv()) is not None:
        began = time.thread_time()
        report = receiver.update_weights(version, DEADLINE)
        pipe.send((report, time.thread_time() - began))
    receiver.close()


class Pair:
    """A trainer in this process and an engine in another."""

    def __init__(self, shape: Shape, stack: ExitStack) -> None:
        from rljob_worker.models.config import ModelConfig
        from rljob_worker.models.manifest import hf_manifest
        from rljob_worker.parallel_layout import ParallelLayout
        from rljob_worker.trainer.megatron.models.convert import local_pieces
        from rljob_worker.weightsync.device_ipc import Exchange
        from rljob_worker.weightsync.plan import build_plan
        from rljob_worker.weightsync.routes import HostRoute
        from rljob_worker.weightsync.trainer import WeightSyncTrainer

        model, folder = (stack.enter_context(tempfile.TemporaryDirectory(prefix="rljob-")) for _ in range(2))
        Path(model, "config.json").write_text(json.dumps(shape.config()))
        config = ModelConfig.from_hf(model)
        pieces = local_pieces(shape.weights(), config, ParallelLayout())
        manifest = list(hf_manifest(config))
        total = sum(torch.Size(size).numel() * 2 for _, size in manifest)
        # The first number of bytes that makes as many buckets, or one less: sizes of modules differ.
        self.plan = next(
            plan
            for parts in range(BUCKETS, 1, -1)
            for plan in [
                build_plan(manifest, {0: pieces}, dtype=torch.bfloat16, engines=1, bucket_bytes=total // parts)
            ]
            if len(plan.buckets) <= BUCKETS
        )
        device = NullDevice()
        stack.callback(device.remove_files)
        self.sender = WeightSyncTrainer(
            pieces,
            self.plan,
            trainer=0,
            route=HostRoute(folder),
            exchange=Exchange(device, [0], device.staging),
        )
        stack.callback(self.sender.close)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._engine = context.Process(target=engine_process, args=(folder, model, theirs), daemon=True)
        self._engine.start()
        stack.callback(self._end)
        assert self._pipe.recv() == "up"

    def sync(self, version: int) -> tuple[float, dict[str, float]]:
        """Microseconds a bucket, and the seconds of each part."""
        self._pipe.send(version)
        started, busy = time.perf_counter(), time.thread_time()
        sent = self.sender.update_weights(version, DEADLINE)
        seconds, busy = time.perf_counter() - started, time.thread_time() - busy
        answer: tuple[EngineReport, float] = self._pipe.recv()
        received, engine_busy = answer
        parts = {f"trainer: {name}": sent[f"{name}_seconds"] for name in ("read", "fill", "spread", "wait")}  # type: ignore[literal-required]
        names = ("begin", "wait", "land", "finish", "rpc")
        parts |= {f"engine: {name}": received[f"{name}_seconds"] for name in names}  # type: ignore[literal-required]
        parts |= {"trainer: processor": busy, "engine: processor": engine_busy}
        return seconds / len(self.plan.buckets) * 1e6, parts

    def _end(self) -> None:
        self._pipe.send(None)
        self._engine.join(60)


def compare(repeats: int) -> list[Figure]:
    """Both models by turns, so that what else the machine does falls on both."""
    torch.set_num_threads(1)
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    os.environ |= environment
    with ExitStack() as stack:
        pairs = [Pair(shape, stack) for shape in (QWEN3_4B, FOUR_TIMES)]
        found = [[pair.sync(version) for pair in pairs] for version in range(1, repeats + 4)][3:]
    medians = []
    for pair, results in zip(pairs, zip(*found, strict=True), strict=True):
        each = [microseconds for microseconds, _ in results]
        medians.append(statistics.median(each))
        size = f"{len(pair.plan.names)} tensors, {len(pair.plan.buckets)} buckets"
        print(f"{size}: {medians[-1]:.0f} us a bucket, best {min(each):.0f}")
        for part in results[0][1]:
            value = statistics.median(parts[part] for _, parts in results) * 1e6 / len(pair.plan.buckets)
            print(f"  {part:18} {value:8.0f} us a bucket")
    buckets = [len(pair.plan.buckets) for pair in pairs]
    more = medians[1] / medians[0]
    return [
        Figure("weight sync on a null device, host work", "microseconds a bucket", medians[0], BUCKET_LIMIT, True),
        Figure(
            "the same with 4 times as many tensors in as many buckets",
            "the row above",
            more,
            TENSORS_LIMIT,
            True,
            note=f"{buckets[1]} buckets and {buckets[0]}",
        ),
    ]
