"""Training tokens per second against a bare megatron-core loop on the same batch, alternating in one process.

The bare loop has what a minimal script has: Megatron's schedule, DistributedDataParallel and distributed optimizer over
the same model, micro-batches padded to the longest sample, log-softmax over all positions and a plain policy gradient.
It has no clipping, entropy, metrics or memory saver. Tokens are the samples' own, padding excluded.

    python benchmarks/train_vs_megatron.py [--preset tiny|medium] [--skewed] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import numpy as np
import torch
from figures import Figure, report
from safetensors.torch import save_file

from rljob_worker.models.config import ModelConfig
from rljob_worker.models.manifest import hf_manifest
from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import SamplingParams, TrainBatch

LIMIT = 0.9
PRESETS: dict[str, dict[str, int]] = {
    "tiny": dict(
        vocab=16,
        hidden=128,
        ffn=256,
        layers=2,
        heads=4,
        head_dim=32,
        prompts=32,
        samples=8,
        prompt=4,
        response=8,
        mbs=256,
    ),
    "medium": dict(
        vocab=4096,
        hidden=512,
        ffn=1536,
        layers=8,
        heads=8,
        head_dim=64,
        prompts=4,
        samples=4,
        prompt=16,
        response=112,
        mbs=4,
    ),
}


def write_model(folder: Path, size: dict[str, int]) -> None:
    config = {
        "model_type": "qwen3",
        "vocab_size": size["vocab"],
        "hidden_size": size["hidden"],
        "intermediate_size": size["ffn"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["heads"] // 2,
        "head_dim": size["head_dim"],
        "tie_word_embeddings": False,
        "max_position_embeddings": 1024,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = hf_manifest(ModelConfig.from_hf(folder))
    weights = {name: torch.ones(s) if len(s) == 1 else torch.randn(s) * 0.02 for name, s in shapes}
    save_file(weights, folder / "model.safetensors")


def make_batch(size: dict[str, int], skewed: bool) -> TrainBatch:
    random = np.random.default_rng(0)
    count, prompt, longest = size["prompts"] * size["samples"], size["prompt"], size["response"]
    lengths = np.full(count, longest)
    if skewed:
        lengths = np.minimum(random.geometric(4 / longest, count), longest)
    return TrainBatch.of_responses(
        tokens=[random.integers(0, size["vocab"], prompt + n) for n in lengths],
        prompt_lengths=np.full(count, prompt),
        rollout_log_probs=[np.full(n, -np.log(size["vocab"]), dtype=np.float32) for n in lengths],
        advantages=random.standard_normal(count).astype(np.float32),
    )


def make_trainer(folder: Path, size: dict[str, int]) -> Trainer:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec: dict[str, Any] = {
        "steps": 100,
        "model": {"path": str(folder)},
        "data": {"synthetic": {}},
        "reward": {"name": "match"},
        "rollout": {
            "promptsPerStep": size["prompts"],
            "samplesPerPrompt": size["samples"],
            "maxResponseTokens": size["response"],
        },
        "algorithm": {"tis": {"enabled": False}},
        "training": {
            "precision": "fp32",
            "maxTokensPerMicroBatch": size["mbs"] * (size["prompt"] + size["response"]),
            "optimizer": {"lr": 1e-5},
        },
        "resources": {"profile": "cpu", "devicesPerNode": 1},
    }
    store = f"tcp://127.0.0.1:{port}"
    trainer = Trainer(
        spec, rank=0, world_size=1, store=store, model_folder=str(folder), secret="of-a-benchmark", total_updates=1000
    )
    trainer.setup()
    return trainer


def timed_trainer(size: dict[str, int], *, processor_time: bool) -> tuple[Trainer, Callable[[], float]]:
    """A trainer of a random model, and the clock of its steps: of the wall, or the processor time of one thread."""
    if processor_time:
        os.environ["OMP_NUM_THREADS"] = "1"
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), size)
        trainer = make_trainer(Path(name), size)
    return trainer, time.process_time if processor_time else time.perf_counter


class BareLoop:
    """A short script's loop around megatron-core."""

    def __init__(self, folder: Path, batch: TrainBatch, micro_batch_size: int) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from rljob_worker.models.hf_io import load_hf_weights
        from rljob_worker.trainer.megatron.models.build import build_gpt_model
        from rljob_worker.trainer.megatron.models.convert import local_pieces
        from rljob_worker.trainer.megatron.parallel_state import megatron_layout

        cfg = ModelConfig.from_hf(folder)
        model: Any = build_gpt_model(cfg, tp=1, pp=1, ep=1, dtype=torch.float32, recompute="None", device="cpu")
        model.config.finalize_model_grads_func = finalize_model_grads
        self.ddp = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            model,
        )
        load_hf_weights(local_pieces(model, cfg, megatron_layout()), folder)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-5, use_distributed_optimizer=True, params_dtype=torch.float32),
            [self.ddp],
            use_gloo_process_groups=False,
        )
        self.run = get_forward_backward_func()
        self.micro_batches = list(self._pad(batch, micro_batch_size))

    @staticmethod
    def _pad(batch: TrainBatch, size: int) -> Iterator[dict[str, torch.Tensor]]:
        longest = int(batch.lengths.max())
        tokens, weights = torch.zeros(len(batch), longest, dtype=torch.int64), torch.zeros(len(batch), longest)
        there = torch.arange(longest) < torch.from_numpy(batch.lengths)[:, None]
        tokens[there] = torch.from_numpy(batch.tokens)
        flat = torch.zeros(len(batch.tokens))
        flat[torch.from_numpy(batch.sampled)] = torch.from_numpy(batch.advantages) / len(batch.advantages)
        weights[there] = flat
        for start in range(0, len(batch), size):
            rows = slice(start, start + size)
            yield {
                "inputs": tokens[rows, :-1].contiguous(),
                "positions": torch.arange(longest - 1).expand(len(tokens[rows]), -1),
                "labels": tokens[rows, 1:].contiguous(),
                "weights": weights[rows, 1:].contiguous(),
            }

    def step(self) -> float:
        """One optimizer update; the loss."""
        count = len(self.micro_batches)

        def forward(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
            part = next(data)
            logits = model(part["inputs"], part["positions"], None)

            def loss(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                log_probs = torch.log_softmax(logits.float(), -1).gather(2, part["labels"][..., None])[..., 0]
                # The ratio of new to old probability is 1; only its gradient matters.
                ratio = torch.exp(log_probs - log_probs.detach())
                value = -(ratio * part["weights"]).sum() * count
                return value, {"loss": value.detach()}

            return logits, loss

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.run(
            forward_step_func=forward,
            data_iterator=iter(self.micro_batches),
            model=[self.ddp],
            num_microbatches=count,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        # Megatron has divided the value in place by the number of micro-batches.
        return float(sum(part["loss"] for part in losses))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--skewed", action="store_true", help="response lengths as skewed as real rollouts'")
    parser.add_argument("--rounds", type=int, default=15, help="alternating steps of each")
    arguments = parser.parse_args()
    size = PRESETS[arguments.preset]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, size)
        batch = make_batch(size, arguments.skewed)
        trainer = make_trainer(folder, size)
        bare = BareLoop(folder, batch, size["mbs"])
    sampling = SamplingParams(max_tokens=size["response"])
    seconds: dict[str, list[float]] = {"rljob": [], "megatron": []}
    first_losses = [0.0, 0.0]
    for number in range(arguments.rounds + 2):
        started = time.perf_counter()
        step = trainer.train(batch, sampling, number + 1)
        middle = time.perf_counter()
        loss = bare.step()
        ended = time.perf_counter()
        if number == 0:
            first_losses = [step.metrics["train/pg_loss"], loss]
        if number >= 2:
            seconds["rljob"].append(middle - started)
            seconds["megatron"].append(ended - middle)
    tokens = len(batch.tokens)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = median["megatron"] / median["rljob"]
    for name, value in median.items():
        print(f"{name:>8}: {value * 1e3:8.1f} ms a step, {tokens / value:8.0f} tokens/s")
    print(
        json.dumps(
            {
                "benchmark": "train_vs_megatron",
                "preset": arguments.preset,
                "skewed": arguments.skewed,
                "tokens": tokens,
                "seconds": median,
                "first_losses": first_losses,
                "ratio": round(ratio, 3),
            }
        )
    )
    trainer.close()
    skewed = ", skewed lengths" if arguments.skewed else ""
    what = f"training tokens/s, preset `{arguments.preset}`, {tokens} tokens{skewed}"
    return report([Figure(what, "a bare megatron-core loop, same batch", ratio, LIMIT)])


if __name__ == "__main__":
    sys.exit(main())
