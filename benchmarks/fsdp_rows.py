"""An FSDP update against a bare FSDP2 loop of the same work, one of adapters against one of all parameters, and a step
with a critic against one without.

Two ranks each, which take turns: all four have processes of their own, and one of them works at a time. The loop is
what a short script is: `fully_shard` over transformers' layers, the same rows of samples, a policy gradient, clipping
and AdamW by torch's utilities. Seconds are those of the slower rank, with `--processor-time` of both ranks' processors.

    python benchmarks/fsdp_rows.py [--rounds N] [--processor-time]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from figures import Figure, add_processor_time, report
from train_vs_megatron import PRESETS, make_batch, write_model

from rljob_worker.trainer.batches import MicroBatch, PackedBatch, plan_step
from rljob_worker.trainer.dealing import Dealing
from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import SamplingParams

SIZE = PRESETS["medium"] | {"hidden": 256, "ffn": 768, "layers": 4, "heads": 4, "vocab": 2048, "prompts": 8}
RANKS = 2
OF_LOOP, OF_WHOLE, WITH_CRITIC = 0.95, 1.05, 2.5
KINDS: dict[str, dict[str, Any] | None] = {
    "whole": {},
    "adapters": {"lora": {"rank": 8, "alpha": 16}},
    "critic": {},
    "loop": None,
}
"""Kinds of training, `critic` by PPO and the others by GRPO; None: the bare loop."""
ROW_TOKENS = SIZE["mbs"] * (SIZE["prompt"] + SIZE["response"])


def spec_of(training: dict[str, Any], algorithm: str) -> dict[str, Any]:
    return {
        "steps": 100,
        "model": {"random": {"config": {"model_type": "qwen3"}}},
        "data": {"synthetic": {}},
        "reward": {"name": "match"},
        "rollout": {
            "promptsPerStep": SIZE["prompts"],
            "samplesPerPrompt": SIZE["samples"],
            "maxResponseTokens": SIZE["response"],
        },
        "algorithm": {"name": algorithm, "tis": {"enabled": False}},
        "training": {
            "backend": "FSDP",
            "precision": "fp32",
            "maxTokensPerMicroBatch": ROW_TOKENS,
            "optimizer": {"lr": 1e-5},
        }
        | training,
        "resources": {"profile": "cpu", "devicesPerNode": RANKS},
    }


def trainer_step(
    folder: Path, store: str, rank: int, training: dict[str, Any], *, critic: bool = False
) -> Callable[[], None]:
    """A step of the trainer; with a critic its values and its updates too."""
    trainer = Trainer(
        spec_of(training, "ppo" if critic else "grpo"),
        rank=rank,
        world_size=RANKS,
        store=store,
        model_folder=str(folder),
        secret="of-a-benchmark",
        total_updates=1000,
    )
    trainer.setup()
    batch, sampling, version = make_batch(SIZE, skewed=False), SamplingParams(max_tokens=SIZE["response"]), 0

    if critic:
        batch = replace(batch, rewards=np.random.default_rng(0).random(len(batch)).astype(np.float32))

    def step() -> None:
        nonlocal version
        version += 1
        if critic:
            trainer.values(batch)
            trainer.critic_train(batch, alone=False)
        trainer.train(batch, sampling, version)

    return step


def loop_step(folder: Path, store: str, rank: int) -> Callable[[], None]:
    """A step of the bare loop."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    packed = PackedBatch(make_batch(SIZE, skewed=False))
    dealing = Dealing(ROW_TOKENS, RANKS, 1, lockstep=False, pair_cost=0.0, segment_cost=None)
    [update] = plan_step(packed, None, dealing, rank)
    selected: list[torch.Tensor] = []

    def select(_head: object, args: tuple[torch.Tensor]) -> torch.Tensor:
        return args[0].flatten(0, 1).index_select(0, selected[0]).unsqueeze(0)

    model.get_output_embeddings().register_forward_pre_hook(select)

    def loss(row: MicroBatch) -> torch.Tensor:
        selected[:] = [row.rows]
        logits = model(input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False).logits.squeeze(0)
        log_probs = logits.float().log_softmax(-1).gather(1, row.labels[:, None]).squeeze(1)
        return -(log_probs * row.advantages).sum() / update.num_tokens

    def step() -> None:
        for row in update.micro_batches:
            loss(row).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def work(kind: str, rank: int, folder: str, processor_time: bool, orders: Connection) -> None:
    """A rank of a kind: a step for each order, answered with its seconds."""
    torch.set_num_threads(1)
    store, training = f"file://{folder}/{kind}", KINDS[kind]
    model = Path(folder) / "model"
    if training is None:
        step = loop_step(model, store, rank)
    else:
        step = trainer_step(model, store, rank, training, critic=kind == "critic")
    clock = time.process_time if processor_time else time.perf_counter
    orders.send(0.0)
    while orders.recv():
        started = clock()
        step()
        orders.send(clock() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each")
    add_processor_time(parser)
    arguments = parser.parse_args()
    together = sum if arguments.processor_time else max
    context = get_context("spawn")
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").mkdir()
        torch.manual_seed(0)
        write_model(Path(folder) / "model", SIZE)
        ends: dict[str, list[Connection]] = {kind: [] for kind in KINDS}
        processes = []
        for kind in KINDS:
            for rank in range(RANKS):
                here, there = context.Pipe()
                ends[kind].append(here)
                process = context.Process(target=work, args=(kind, rank, folder, arguments.processor_time, there))
                process.start()
                # An end that closes with its process is noticed where it is read.
                there.close()
                processes.append(process)
        for kind in KINDS:
            for end in ends[kind]:
                end.recv()
        for turn in range(arguments.rounds + 1):
            for kind in KINDS:
                for end in ends[kind]:
                    end.send(True)
                taken = together([end.recv() for end in ends[kind]])
                if turn:  # the first round warms all up
                    seconds[kind].append(taken)
        for process in processes:
            process.terminate()
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    print(json.dumps({"benchmark": "fsdp_rows", "seconds": median}))
    return report(
        [
            Figure("FSDP update, 2 ranks", "a bare FSDP2 loop, same batch", median["loop"] / median["whole"], OF_LOOP),
            Figure(
                "update of adapters (rank 8, merged)",
                "one of all parameters",
                median["adapters"] / median["whole"],
                OF_WHOLE,
                at_most=True,
            ),
            Figure(
                "a step with a critic: values, 4 updates of it, 1 of the policy",
                "1 update of the policy",
                median["critic"] / median["whole"],
                WITH_CRITIC,
                at_most=True,
            ),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
