"""Two ranks with half of the vocabulary each give what one rank with all of it gives."""

from __future__ import annotations

import datetime
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rljob_worker.algorithms import response_log_probs
from rljob_worker.types import SamplingParams

SAMPLINGS = [
    SamplingParams(1, temperature=0.7),
    SamplingParams(1, top_k=6),
    SamplingParams(1, top_p=0.8, temperature=1.2),
    SamplingParams(1, min_p=0.05),
    SamplingParams(1, min_p=0.01, top_k=15, top_p=0.9),
]
# (vocabulary, padded vocabulary): none, some, a shard of padding only; and a vocabulary of one shard and a token.
SIZES = [(64, 64), (61, 64), (30, 64), (33, 64)]
ROWS, WORLD = 23, 2


def case(vocab: int, padded: int, ties: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    logits = 2 * torch.randn(ROWS, padded, generator=generator)
    if ties:
        logits = logits.round()
    logits[0, :32] -= 200.0
    logits[:, vocab:] = 50.0
    labels = torch.randint(0, vocab, (ROWS,), generator=generator)
    return logits, labels, torch.randn(2, ROWS, generator=generator)


def evaluate(group: dist.ProcessGroup | None, rank: int, world: int) -> list[dict[str, Any]]:
    results = []
    for vocab, padded in SIZES:
        for ties in (False, True):
            for sampling in SAMPLINGS:
                logits, labels, weights = case(vocab, padded, ties)
                width = padded // world
                shard = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
                log_probs, entropy = response_log_probs(shard, labels, sampling, group, vocab, entropy_grad=True)
                (grad,) = torch.autograd.grad((weights[0] * log_probs + weights[1] * entropy).sum(), shard)
                results.append({"log_probs": log_probs.detach(), "entropy": entropy.detach(), "grad": grad})
    return results


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=240),
    )
    try:
        torch.save(evaluate(dist.group.WORLD, rank, WORLD), f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_shards_equal_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=rank_main, args=(rank, str(tmp_path))) for rank in range(WORLD)]
    for process in processes:
        process.start()
    whole = evaluate(None, 0, 1)
    for process in processes:
        process.join(timeout=300)
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * WORLD
    shards = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(WORLD)]
    assert len(whole) == len(SIZES) * 2 * len(SAMPLINGS)
    for expected, *parts in zip(whole, *shards, strict=True):
        for name in ("log_probs", "entropy"):
            assert torch.equal(parts[0][name], parts[1][name])
            torch.testing.assert_close(parts[0][name], expected[name], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(torch.cat([p["grad"] for p in parts], 1), expected["grad"], rtol=1e-4, atol=2e-6)
