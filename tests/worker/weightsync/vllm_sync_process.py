"""Run as a program: real vLLM engines take weights from two senders; prints one JSON line per model.

For each model (`@devices`: with slots of one device, not of the host; `@place`: without slots): a fresh engine on the
target folder generates; an engine on other weights takes part in a sync that is broken on purpose, then in a good one,
and generates.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}

import torch
from safetensors.torch import load_file
from separate_devices import SeparateDevice
from sync_cases import in_shared_pages, pieces_for, plan_for

from rljob_worker.errors import WeightSyncError
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.facts import ModelFacts
from rljob_worker.models.manifest import final_norm, hf_manifest, layer_prefix
from rljob_worker.weightsync.device_ipc import Exchange
from rljob_worker.weightsync.engine import WeightSyncEngine
from rljob_worker.weightsync.routes import HostRoute, InPlaceRoute
from rljob_worker.weightsync.shared_memory import SHARED_MEMORY
from rljob_worker.weightsync.slots import SLOT_COUNT
from rljob_worker.weightsync.trainer import WeightSyncTrainer

EXTENSION = "rljob_worker.weightsync.vllm_extension.WeightLandingExtension"
EXTENSION_ON_DEVICES = "separate_extension.SeparateDeviceExtension"


def make_engine(folder: Path, tensor_parallel: int, dtype: str, extension: str, **more: object) -> Any:
    from vllm import LLM

    hybrid = {"language_model_only": True, "mamba_ssm_cache_dtype": "float32"}

    return LLM(
        str(folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=128,
        enforce_eager=True,
        max_num_seqs=8,
        tensor_parallel_size=tensor_parallel,
        worker_extension_cls=extension,
        disable_log_stats=True,
        **(hybrid if ModelFacts.from_hf(folder).language_half else {}),
        **more,
    )


def generate(engine: Any, vocab_size: int) -> tuple[list[list[int]], list[list[float]]]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [(step * i) % (vocab_size - 1) for i in range(1, 24)]} for step in (7, 13)]
    outputs = [output.outputs[0] for output in engine.generate(prompts, sampling, use_tqdm=False)]
    log_probs = [[next(iter(entry.values())).logprob for entry in output.logprobs] for output in outputs]
    return [list(output.token_ids) for output in outputs], log_probs


def sync(senders: list[WeightSyncTrainer], receiver: WeightSyncEngine, version: int) -> tuple[str, Any]:
    """Run one sync with a thread for each sender; (what the receiver raised, its report)."""
    errors: list[str] = []

    def send(sender: WeightSyncTrainer) -> None:
        try:
            sender.update_weights(version, 60.0)
        except WeightSyncError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in senders]
    for thread in threads:
        thread.start()
    try:
        return "", receiver.update_weights(version, 60.0)
    except WeightSyncError as error:
        return str(error), None
    finally:
        for thread in threads:
            thread.join()
        assert len(errors) in (0, len(senders))


def run(models: Path, model: str, tensor_parallel: int) -> dict[str, Any]:
    kind, _, where = model.partition("@")
    device = SeparateDevice(0) if where == "devices" else None
    in_place, trainers = where == "place", 2 if device is None else 1
    target = models / f"{kind}-target"
    cfg = ModelConfig.from_hf(target)
    stored = load_file(target / "model.safetensors")
    weights = {name: stored[name] for name, _ in hf_manifest(cfg)}
    if in_place:
        weights = in_shared_pages(weights)
    dtype = "float32" if kind.endswith("float32") else "bfloat16"
    vocab_size = cfg.vocab_size
    extension = EXTENSION if device is None else EXTENSION_ON_DEVICES
    fresh = make_engine(target, tensor_parallel, dtype, extension)
    expected = generate(fresh, vocab_size)
    shut_down(fresh)
    engine = make_engine(models / f"{kind}-start", tensor_parallel, dtype, extension)
    before = generate(engine, vocab_size)
    # As a job does: cut between rows in host memory, whole modules on devices and without slots.
    slice_bytes = 30 * 1024 if device is None and not in_place else None
    plan = plan_for(weights, trainers=trainers, bucket_bytes=96 * 1024, slice_bytes=slice_bytes)
    assert (slice_bytes is not None) == any(t.shape != plan.shapes[t.name] for b in plan.buckets for t in b.tensors)
    wrong = wrong_plans(engine, weights, cfg) if slice_bytes is not None else {}
    damaged: list[int] = []

    def land(method: Callable[..., Any], message: Any, seconds: float) -> Any:
        if method.__name__ == "rljob_land_bucket" and message["bucket"] == 2 and not damaged:
            last = plan.buckets[2].tensors[-1]
            if in_place:
                damaged.append(5)
                weights[last.name].view(-1).view(torch.uint8)[5] ^= 4
            else:
                slot = device.files[2 % SLOT_COUNT] if device is not None else slot_file(folder, 2 % SLOT_COUNT)
                damaged.append(flip_bit(slot, last.offset + 5))
        return engine.collective_rpc(method.__name__, timeout=seconds, args=(message,))

    with tempfile.TemporaryDirectory(prefix="rljob-test-") as folder:
        pieces = pieces_for(weights, trainers)
        exchange = None if device is None else Exchange(device, [0], device.staging)
        route = InPlaceRoute(folder) if in_place else HostRoute(folder)
        senders = [
            WeightSyncTrainer(pieces[rank], plan, trainer=rank, route=route, exchange=exchange)
            for rank in range(trainers)
        ]
        receiver = WeightSyncEngine(land, route=route, engine=0)
        failure, _ = sync(senders, receiver, 1)
        if in_place:
            weights[plan.buckets[2].tensors[-1].name].view(-1).view(torch.uint8)[5] ^= 4
        version_after_failure = receiver.version
        unexpected, report = sync(senders, receiver, 2)
        version = receiver.version
        for peer in (*senders, receiver):
            peer.close()
    if unexpected:
        raise WeightSyncError(unexpected)
    engine.reset_prefix_cache()
    after = generate(engine, vocab_size)
    shut_down(engine)
    if device is not None:
        device.remove_files()
    return {
        "kind": model,
        "buckets": len(plan.buckets),
        "wrong_plans": wrong,
        "failure": failure,
        "version_after_failure": version_after_failure,
        "version": version,
        "report": report,
        "changed": before[0] != after[0],
        "same_tokens": after[0] == expected[0],
        "log_prob_difference": max(
            abs(a - b) for ours, theirs in zip(after[1], expected[1]) for a, b in zip(ours, theirs)
        ),
    }


def wrong_plans(engine: Any, weights: dict[str, torch.Tensor], cfg: ModelConfig) -> dict[str, str]:
    """Errors of syncs whose trainers agree on a set of tensors that is not the engine's."""
    norm = final_norm(cfg)
    extra = {f"{layer_prefix(cfg, 0)}mlp.extra_proj.weight": torch.zeros(8, 8, dtype=weights[norm].dtype)}
    k_proj = f"{layer_prefix(cfg, 1)}self_attn.k_proj.weight"
    cases = {
        "part of a module": {name: tensor for name, tensor in weights.items() if name != k_proj},
        "whole module": {name: tensor for name, tensor in weights.items() if name != norm},
        "unknown tensor": weights | extra,
    }
    failures = {}
    for case, tensors in cases.items():
        with tempfile.TemporaryDirectory(prefix="rljob-test-") as folder:
            plan = plan_for(tensors, bucket_bytes=96 * 1024, slice_bytes=30 * 1024)
            sender = WeightSyncTrainer(pieces_for(tensors, 1)[0], plan, trainer=0, route=HostRoute(folder))
            receiver = WeightSyncEngine(
                lambda method, message, seconds: engine.collective_rpc(
                    method.__name__, timeout=seconds, args=(message,)
                ),
                route=HostRoute(folder),
                engine=0,
            )
            failures[case], _ = sync([sender], receiver, 1)
            assert receiver.version is None
            sender.close()
            receiver.close()
    return failures


def slot_file(folder: str, slot: int) -> Path:
    names = json.loads((Path(folder) / "plan.json").read_text())["slots"]
    return SHARED_MEMORY / names[slot]


def flip_bit(path: Path, offset: int) -> int:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    return byte


def shut_down(engine: Any) -> None:
    engine.llm_engine.engine_core.shutdown()
    gc.collect()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for model in sys.argv[3:]:
        print("RESULT " + json.dumps(run(Path(sys.argv[1]), model, int(sys.argv[2]))), flush=True)
