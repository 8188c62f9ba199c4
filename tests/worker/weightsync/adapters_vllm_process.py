"""Run as a program: adapters alone, from three ranks, into a running vLLM engine; prints a JSON line."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from fsdp_vllm_process import PROMPTS, RANKS, furthest, random_model
from support.architectures import ARCHITECTURES
from vllm_sync_process import EXTENSION, make_engine, shut_down, sync

from rljob_api.spec import RLJobSpec
from rljob_worker.engine.adapters import adapted_names, load_policy_adapter
from rljob_worker.models.adapters import LoraLinear, adapter_views, adapters_of, add_adapters, scaled
from rljob_worker.models.hf_model import build_hf_model
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.trainer.fsdp.pieces import pieces_of_rows, rows_of
from rljob_worker.weightsync.engine import WeightSyncEngine
from rljob_worker.weightsync.plan import SyncPlan, build_plan
from rljob_worker.weightsync.routes import HostRoute
from rljob_worker.weightsync.trainer import WeightSyncTrainer

SCALE = 2.0


def spec_of(targets: list[str] | None) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "steps": 1,
            "mode": "Disaggregated",
            "model": {"path": "/x"},
            "data": {"synthetic": {}},
            "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 16},
            "training": {
                "backend": "FSDP",
                "precision": "fp32",
                "lora": {"rank": 8, "alpha": 8 * SCALE, "targets": targets, "handover": "Adapters"},
            },
            "resources": {"profile": "cpu", "trainer": {"devicesPerNode": 1}, "rollout": {"devicesPerNode": 1}},
        }
    )


def with_adapters(model: Any, spec: RLJobSpec, values: dict[str, torch.Tensor]) -> Any:
    """A transformers model whose modules compute with adapters beside their weights."""
    assert spec.training.lora is not None
    for name, tensor in values.items():
        module_name, _, which = name.rpartition(".")
        module = model.get_submodule(module_name)
        if not isinstance(module, LoraLinear):
            module = LoraLinear(module, spec.training.lora.rank, SCALE, merges=False)
            parent, _, own = module_name.rpartition(".")
            setattr(model.get_submodule(parent), own, module)
        setattr(module, which, torch.nn.Parameter(tensor))
    return model


def pieces_of(values: dict[str, torch.Tensor], views: list[Any]) -> tuple[dict[int, list[Any]], dict[int, list[Any]]]:
    """Each rank's, B with its scale; and their places."""
    sizes = {name: len(tensor) for name, tensor in values.items()}
    pieces = {}
    for layout in ParallelLayout(RANKS, shards=RANKS).every_rank():
        rows = {name: rows_of(size, layout) for name, size in sizes.items()}
        shard = {name: values[name][rows[name].start : rows[name].stop].clone() for name in values}
        handed = {name: scaled(rows, SCALE) if name.endswith("B") else rows for name, rows in shard.items()}
        pieces[layout.rank] = pieces_of_rows(handed, views, sizes, layout)
    return pieces, {rank: [piece.place for piece in held] for rank, held in pieces.items()}


def generated(engine: Any, request: Any) -> list[tuple[list[int], list[float]]]:
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=1, logprobs=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    found = []
    for output in engine.generate(prompts, sampling, use_tqdm=False, lora_request=request):
        tokens = list(output.outputs[0].token_ids)
        found.append((tokens, [e[t].logprob for e, t in zip(output.outputs[0].logprobs, tokens)]))
    return found


def run(name: str, targets: list[str] | None, folder: Path) -> dict[str, Any]:
    spec = spec_of(targets)
    lora = spec.training.lora
    assert lora is not None
    base = random_model(name, 1)
    base.save_pretrained(folder / "start")
    shape = build_hf_model(ARCHITECTURES[name])
    add_adapters(shape, lora, torch.float32, "x")
    views, trained = adapter_views(shape), len(adapters_of(shape))
    generator = torch.Generator().manual_seed(5)
    values = {view.name: torch.empty(view.shape).normal_(std=0.1, generator=generator) for view in views}
    pieces, places = pieces_of(values, views)
    manifest = [(view.name, view.shape) for view in views]
    plan: SyncPlan = build_plan(manifest, places, dtype=torch.float32, engines=1, bucket_bytes=2**14, slice_bytes=2**12)
    engine = make_engine(
        folder / "start",
        1,
        "float32",
        EXTENSION,
        enable_lora=True,
        max_loras=1,
        max_cpu_loras=1,
        max_lora_rank=lora.rank,
        lora_target_modules=adapted_names(folder / "start", lora),
    )
    request = load_policy_adapter(engine.llm_engine, spec, folder / "start")
    before = furthest(base, generated(engine, request))
    route = HostRoute(str(folder))
    senders = [WeightSyncTrainer(pieces[rank], plan, trainer=rank, route=route) for rank in range(RANKS)]
    receiver = WeightSyncEngine(
        lambda method, message, seconds: engine.collective_rpc(method.__name__, timeout=seconds, args=(message,)),
        route=route,
        engine=0,
    )
    failure, report = sync(senders, receiver, 1)
    first = generated(engine, request)
    distances = {"before": before, "old": furthest(base, first)}
    policy = with_adapters(base, spec, values)
    distances["first"] = furthest(policy, first)
    for peer in (*senders, receiver):
        peer.close()
    shut_down(engine)
    return {
        "failure": failure,
        "verified": report and report["verified"],
        "bytes": report and report["bytes"],
        "expected": sum(tensor.nbytes for tensor in values.values()),
        "modules": trained,
        **distances,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, *targets = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="rljob-test-") as place:
        print("RESULT " + json.dumps(run(name, targets or None, Path(place))), flush=True)
