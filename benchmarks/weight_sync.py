"""Weight sync of a Qwen3 with about 150 M parameters against a memory copy, and against pickled tensors over Ray.

    python benchmarks/weight_sync.py
    python benchmarks/weight_sync.py --null     # what the host does for a bucket, see null_device.py

A trainer process holds the weights in Megatron's layout, an engine process runs vLLM; both are Ray actors, as in a job.
Verification is on. The copies, the syncs and the pickled transfers take turns, and medians are compared, so that what
else the machine does falls on all of them. Exits with 1 when a ratio misses its limit.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import null_device
import torch
from figures import Figure
from figures import report as report_rows

from rljob_worker.types import EngineReport, TrainerReport
from rljob_worker.weightsync.meeting import NetworkMeeting
from rljob_worker.weightsync.routes import BroadcastRoute, DiskRoute, HostRoute, InPlaceRoute

if TYPE_CHECKING:
    from rljob_worker.models.config import ModelConfig

HIDDEN, LAYERS, HEADS, GROUPS, HEAD_DIM, FFN, VOCAB = 768, 15, 12, 4, 64, 2304, 32768
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# Where vLLM packs the weights for oneDNN's products, where it computes with them as they are, and where it does so on
# another node than the trainer: both are on this machine, and what goes over the network goes over its loopback, what
# goes through a folder through that of temporary files.
PACKED, PLAIN, STRAIGHT, NETWORK, DISK = "packed", "plain", "straight", "network", "disk"
PRODUCTS = {
    PACKED: "packed products",
    PLAIN: "plain products",
    STRAIGHT: "plain products, from the trainer's own memory",
    NETWORK: "plain products, over the network",
    DISK: "plain products, through a folder",
}
COPY_LIMITS, PICKLE_LIMIT = {PACKED: 0.15, PLAIN: 0.35, STRAIGHT: 0.7, NETWORK: 0.1, DISK: 0.05}, 3.0
DEADLINE = 120.0


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of one trainer rank of a Qwen3, in Megatron's names and shapes."""
    hidden, heads, groups = config.hidden_size, config.num_heads, config.num_query_groups
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attention.linear_qkv.weight": ((heads + 2 * groups) * config.head_dim, hidden),
        "self_attention.q_layernorm.weight": (config.head_dim,),
        "self_attention.k_layernorm.weight": (config.head_dim,),
        "self_attention.linear_proj.weight": (hidden, heads * config.head_dim),
        "pre_mlp_layernorm.weight": (hidden,),
        "mlp.linear_fc1.weight": (2 * config.ffn_hidden_size, hidden),
        "mlp.linear_fc2.weight": (hidden, config.ffn_hidden_size),
    }
    layers = range(config.num_layers)
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (config.vocab_size, hidden)}
    shapes |= {f"decoder.layers.{i}.{name}": shape for i in layers for name, shape in layer.items()}
    shapes |= {"decoder.final_layernorm.weight": (hidden,)}
    return shapes if config.tied_embeddings else shapes | {"output_layer.weight": (config.vocab_size, hidden)}


class TrainerSide:
    """Holds the weights and sends them."""

    def __init__(self, model_folder: str, route: str, bucket_bytes: int) -> None:
        from rljob_worker.devices.cpu import CpuDevice
        from rljob_worker.memory.sleeping import shareable
        from rljob_worker.models.config import ModelConfig
        from rljob_worker.models.manifest import hf_manifest
        from rljob_worker.parallel_layout import ParallelLayout
        from rljob_worker.trainer.megatron.models.convert import local_pieces
        from rljob_worker.weightsync.plan import HOST_SLICE_BYTES, build_plan
        from rljob_worker.weightsync.routes import route_from
        from rljob_worker.weightsync.trainer import WeightSyncTrainer

        config, way = ModelConfig.from_hf(model_folder), route_from(route)
        with shareable(CpuDevice(), None) if way.in_place else nullcontext():
            weights = {
                name: (torch.randn(shape) * 0.02).to(torch.bfloat16) for name, shape in shapes_of(config).items()
            }
        self._pieces = local_pieces(weights, config, ParallelLayout())
        plan = build_plan(
            hf_manifest(config),
            {0: self._pieces},
            dtype=torch.bfloat16,
            engines=1,
            bucket_bytes=bucket_bytes,
            slice_bytes=None if way.in_place else HOST_SLICE_BYTES,
        )
        self._plan = plan
        self._sender = WeightSyncTrainer(self._pieces, plan, trainer=0, route=way)

    def describe(self) -> dict[str, int]:
        return {"bytes": self._plan.nbytes, "tensors": len(self._plan.names), "buckets": len(self._plan.buckets)}

    def send(self, version: int) -> TrainerReport:
        return self._sender.update_weights(version, DEADLINE)

    def send_pickled(self, engine: Any) -> None:
        """One awaited actor call for each tensor, which Ray pickles."""
        import ray

        ray.get(engine.pickled_begin.remote())
        for piece in self._pieces:
            ray.get(engine.pickled_tensor.remote(piece.hf_name, piece.read()))
        ray.get(engine.pickled_finish.remote())

    def close(self) -> None:
        self._sender.close()


class EngineSide:
    """A real vLLM engine."""

    def __init__(self, model_folder: str, route: str, kind: str) -> None:
        import vllm._custom_ops as ops
        from vllm import LLM

        from rljob_worker.weightsync.engine import WeightSyncEngine
        from rljob_worker.weightsync.routes import route_from

        if kind != PACKED:
            # As on CPUs that these products have no instructions for.
            ops._supports_onednn = False
        self._engine = LLM(
            model_folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=128,
            enforce_eager=True,
            max_num_seqs=8,
            worker_extension_cls="rljob_worker.engine.worker_extension.CpuWorkerExtension",
            disable_log_stats=True,
        )
        self._receiver = WeightSyncEngine(self._land, route=route_from(route), engine=0)

    def _land(self, method: Callable[..., Any], message: Any, seconds: float) -> list[Any]:
        return self._engine.collective_rpc(method.__name__, timeout=seconds, args=(message,))

    def receive(self, version: int) -> EngineReport:
        return self._receiver.update_weights(version, DEADLINE)

    def copy_seconds(self, nbytes: int) -> float:
        """A plain copy between two buffers whose pages have been touched, with this process's threads."""
        if not hasattr(self, "_source"):
            self._source, self._target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
        started = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - started

    def alone_seconds(self) -> float:
        """An engine's copies and checksums out of a slot in the cache, waiting for nobody: no sync takes less."""
        from rljob_worker.weightsync.plan import HOST_SLICE_BYTES
        from rljob_worker.weightsync.shared_memory import Landing
        from rljob_worker.weightsync.slots import Move

        slot = self._source[:HOST_SLICE_BYTES]
        targets = self._target.split(len(slot))
        batches = [Landing([Move(slot[: len(target)], target, target)]) for target in targets]
        started = time.perf_counter()
        for batch in batches:
            batch.run()
        return time.perf_counter() - started

    def pickled_begin(self) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        layerwise.initialize_layerwise_reload(self._model())

    def pickled_tensor(self, name: str, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            self._model().load_weights([(name, tensor)])

    def pickled_finish(self) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        layerwise.finalize_layerwise_reload(self._model(), self._engine.model_config)

    def _model(self) -> Any:
        # The engine runs inside this process, so its only worker is at hand.
        core: Any = self._engine.llm_engine.engine_core
        core = core.engine_core
        return core.model_executor.driver_worker.worker.model_runner.model

    def close(self) -> None:
        self._receiver.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="rounds that are measured (default 9)")
    parser.add_argument("--kinds", nargs="+", choices=COPY_LIMITS, default=list(COPY_LIMITS), help="of engines")
    parser.add_argument("--bucket-bytes", type=int, default=256 * 2**20, help="as spec.weightSync.bucketBytes")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each process")
    parser.add_argument("--null", action="store_true", help="the host's work alone, on a null device")
    options = parser.parse_args()
    if options.null:
        return report_rows(null_device.compare(max(options.repeats, 15)))

    import ray

    from rljob_worker.upstream.switches import TORCH_LINEAR

    environment = {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCHDYNAMO_DISABLE": "1",
        TORCH_LINEAR: "1",
    }
    with tempfile.TemporaryDirectory(prefix="rljob-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            object_store_memory=2**30,
            runtime_env={"env_vars": environment},
        )
        try:
            figures = [
                figure
                for kind in options.kinds
                for figure in compare(kind, folder, options.bucket_bytes, options.repeats)
            ]
        finally:
            ray.shutdown()
    return report_rows(figures)


def compare(kind: str, model_folder: str, bucket_bytes: int, repeats: int) -> list[Figure]:
    """Measure and report with one kind of engine."""
    import ray

    with tempfile.TemporaryDirectory(prefix="rljob-") as folder:
        host = "127.0.0.2"
        meeting = NetworkMeeting(
            host, free_port(host), host, secrets.token_hex(32), engines=1, workers=1, seconds=DEADLINE
        )
        over_network = DiskRoute(meeting, f"{folder}/buckets") if kind == DISK else BroadcastRoute(meeting)
        apart = kind in (NETWORK, DISK)
        here = over_network if apart else InPlaceRoute(folder) if kind == STRAIGHT else HostRoute(folder)
        there = over_network.at("127.0.0.3") if apart else here
        trainer: Any = ray.remote(num_cpus=0)(TrainerSide).remote(model_folder, here.to_json(), bucket_bytes)
        engine: Any = ray.remote(num_cpus=0)(EngineSide).remote(model_folder, there.to_json(), kind)
        try:
            return report(kind, ray.get(trainer.describe.remote()), *measure(trainer, engine, repeats))
        finally:
            ray.get([trainer.close.remote(), engine.close.remote()])
            for actor in (trainer, engine):
                ray.kill(actor)


def free_port(host: str) -> int:
    """A port of `host` that nobody listens on."""
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def measure(trainer: Any, engine: Any, repeats: int) -> tuple[dict[str, list[float]], list[dict[str, float]]]:
    """Seconds of each kind of transfer, and the breakdown of each sync; the first round warms everything up."""
    import ray

    nbytes = ray.get(trainer.describe.remote())["bytes"]
    seconds: dict[str, list[float]] = {"copy": [], "alone": [], "sync": [], "pickled": []}
    breakdowns = []
    for version in range(1, repeats + 2):
        copies = [ray.get(engine.copy_seconds.remote(nbytes)) for _ in range(3)]
        alone = ray.get(engine.alone_seconds.remote())
        started = time.perf_counter()
        sent, received = ray.get([trainer.send.remote(version), engine.receive.remote(version)])
        sync = time.perf_counter() - started
        started = time.perf_counter()
        ray.get(trainer.send_pickled.remote(engine))
        pickled = time.perf_counter() - started
        if version == 1:
            continue
        found = {"copy": statistics.median(copies), "alone": alone, "sync": sync, "pickled": pickled}
        for kind, value in found.items():
            seconds[kind].append(value)
        sender = {f"trainer: {name}": sent[f"{name}_seconds"] for name in ("read", "fill", "network", "wait")}
        parts = ("begin", "wait", "land", "repack", "finish", "rpc")
        breakdowns.append(sender | {f"engine: {name}": received[f"{name}_seconds"] for name in parts})
    return seconds, breakdowns


def report(
    kind: str, size: dict[str, int], seconds: dict[str, list[float]], breakdowns: list[dict[str, float]]
) -> list[Figure]:
    """Print the medians; the rows."""
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    print(f"{PRODUCTS[kind]}: {size['bytes'] / 1e6:.0f} MB in {size['tensors']} tensors, {size['buckets']} buckets")
    for transfer, value in median.items():
        best = min(seconds[transfer])
        print(f"{transfer:8} {value * 1e3:8.1f} ms  {size['bytes'] / value / 1e9:6.2f} GB/s  best {best * 1e3:.1f} ms")
    for part in breakdowns[0]:
        print(f"  {part:18} {statistics.median(b[part] for b in breakdowns) * 1e3:8.1f} ms")
    print(f"bound of the ratio by one side's copies and checksums alone: {median['copy'] / median['alone']:.2f}")
    what = f"weight sync bytes/s, {size['bytes'] / 1e6:.0f} MB in bf16, verified, {PRODUCTS[kind]}"
    copied, pickled = median["copy"] / median["sync"], median["pickled"] / median["sync"]
    return [
        Figure(what, "a memory copy of the same bytes", copied, COPY_LIMITS[kind]),
        Figure(what, "pickled tensors, one call each", pickled, PICKLE_LIMIT),
    ]


if __name__ == "__main__":
    sys.exit(main())
