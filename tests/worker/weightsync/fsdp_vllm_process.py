"""Run as a program: FSDP's rows of an architecture, from three ranks, into a running vLLM engine; prints a JSON line.

vLLM keeps its expert groups in a process, so each architecture has one of its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from support.architectures import ARCHITECTURES
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_sync_process import EXTENSION, make_engine, shut_down, sync

from rljob_worker.models.checkpoint_views import checkpoint_views
from rljob_worker.models.hf_model import build_hf_model
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.trainer.fsdp.pieces import pieces_of_rows, rows_of
from rljob_worker.weightsync.engine import WeightSyncEngine
from rljob_worker.weightsync.plan import build_plan
from rljob_worker.weightsync.routes import HostRoute
from rljob_worker.weightsync.trainer import WeightSyncTrainer

PROMPTS = [[(5 * i + k) % 60 + 3 for i in range(12)] for k in range(3)]
RANKS = 3


def random_model(name: str, seed: int) -> Any:
    config = AutoConfig.for_model(**ARCHITECTURES[name])
    attention = "eager" if name == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.empty_like(parameter).normal_(std=0.05, generator=generator)
            parameter.copy_(noise) if parameter.dim() > 1 else parameter.add_(noise)
    return model.eval()


@torch.no_grad()
def score(model: Any, tokens: list[int]) -> list[float]:
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().log_softmax(-1)
    return [float(logits[place, token]) for place, token in enumerate(tokens[1:])]


def furthest(model: Any, generated: list[tuple[list[int], list[float]]]) -> float:
    """Largest distance of the engine's log-probabilities from transformers'."""
    distances = []
    for prompt, (tokens, log_probs) in zip(PROMPTS, generated, strict=True):
        ours = score(model, prompt + tokens)[len(prompt) - 1 :]
        distances += [abs(a - b) for a, b in zip(ours, log_probs, strict=True)]
    return max(distances)


def run(name: str, folder: Path) -> dict[str, Any]:
    from vllm import SamplingParams

    start, target = random_model(name, 1), random_model(name, 2)
    start.save_pretrained(folder / "start")
    views = checkpoint_views(build_hf_model(ARCHITECTURES[name]))
    sizes = {n: parameter.shape[0] for n, parameter in target.named_parameters()}
    pieces = {}
    for layout in ParallelLayout(RANKS, shards=RANKS).every_rank():
        rows = {n: rows_of(size, layout) for n, size in sizes.items()}
        shard = {n: p.detach()[rows[n].start : rows[n].stop].clone() for n, p in target.named_parameters()}
        pieces[layout.rank] = pieces_of_rows(shard, views, sizes, layout)
    plan = build_plan(
        [(view.name, view.shape) for view in views],
        {rank: [piece.place for piece in held] for rank, held in pieces.items()},
        dtype=torch.float32,
        engines=1,
        bucket_bytes=2**20,
        slice_bytes=2**15,
    )
    engine = make_engine(folder / "start", 1, "float32", EXTENSION)
    route = HostRoute(str(folder))
    senders = [WeightSyncTrainer(pieces[rank], plan, trainer=rank, route=route) for rank in range(RANKS)]
    receiver = WeightSyncEngine(
        lambda method, message, seconds: engine.collective_rpc(method.__name__, timeout=seconds, args=(message,)),
        route=route,
        engine=0,
    )
    failure, report = sync(senders, receiver, 1)
    for peer in (*senders, receiver):
        peer.close()
    engine.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=1, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    generated = []
    for output in (request.outputs[0] for request in outputs):
        tokens = list(output.token_ids)
        generated.append((tokens, [entry[token].logprob for entry, token in zip(output.logprobs, tokens)]))
    shut_down(engine)
    distances = {"from_new": furthest(target, generated), "from_old": furthest(start, generated)}
    return {"failure": failure, "verified": report and report["verified"], "tensors": len(views)} | distances


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rljob-test-") as place:
        print("RESULT " + json.dumps(run(sys.argv[1], Path(place))), flush=True)
