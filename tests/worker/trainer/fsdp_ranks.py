"""Runs FSDP's cases, and Megatron's that they are held to, in processes of their own; `test_fsdp.py` starts it.

Called as `python fsdp_ranks.py RANK FOLDER CASE...` in as many processes as the largest case has ranks. The ranks of a
case meet in a file of FOLDER, and each of them writes what it saw to `FOLDER/CASE.rank-N.pt`.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from cases import MANY_TERMS, SAMPLING, Result, make_batch, make_spec, same, step

from rljob_worker.algorithms.output_layer import Blocks
from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.errors import StopRequested
from rljob_worker.memory.arena import Arena
from rljob_worker.models import adapters
from rljob_worker.models.adapters import merged
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.trainer import state_buckets
from rljob_worker.trainer.fsdp import optimizer, rank_state
from rljob_worker.trainer.trainer import Trainer

LAST = 9
"""Seed of the step after the one that is saved."""
DEADLINE = 300.0


def make_trainer(case: str, model: str, rank: int, world: int, folder: Path, **training: Any) -> Trainer:
    trainer = Trainer(
        make_spec(world, **training),
        rank=rank,
        world_size=world,
        store=f"file://{folder}/store-{case}",
        secret="of-a-test",
        model_folder=str(folder / model),
        total_updates=100,
    )
    trainer.setup()
    return trainer


def state(trainer: Trainer) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (*trainer.backend.trained, *trainer.backend.optimizer_state)]


def pieces(trainer: Trainer) -> list[tuple[str, tuple[int, ...], int | None, int, torch.Tensor]]:
    backend = trainer.backend
    with backend.handing_over():
        return [
            (p.hf_name, p.hf_shape, p.dim, p.start, p.read().clone())
            for p in backend.pieces(backend.layout)
            if p.primary
        ]


def train(trainer: Trainer, seed: int) -> dict[str, float]:
    report = step(trainer, seed)
    assert report.applied, report.detail
    return report.metrics


def slept(trainer: Trainer) -> tuple[int, bool]:
    """Resident bytes while asleep, and whether the bits are the same afterwards."""
    before = state(trainer)
    trainer.sleep()
    arena = cast(Arena, trainer.backend.memory)
    resident = arena.resident_bytes()
    trainer.wake_up()
    offloaded = trainer.spec.training.optimizer.host_offload
    sleeping = [*trainer.backend.trained, *([] if offloaded else trainer.backend.optimizer_state)]
    assert all(arena.contains(t) for t in sleeping if t.numel()), "not all of the state is in the memory saver"
    return resident, same(before, state(trainer))


def run(trainer: Trainer, folder: Path, save: str = "") -> Result:
    """Three steps with a nap after each but the last; scores; saved asleep where that is asked for; and a step."""
    metrics: list[dict[str, float]] = []
    naps = []
    for seed in range(3):
        metrics.append(train(trainer, seed))
        if seed < 2:
            naps.append(slept(trainer))
    result: Result = {"metrics": metrics, "naps": naps, "pieces": pieces(trainer)}
    result["scores"] = trainer.score([np.array([1, 2, 3, 4]), np.array([5, 6]), np.array([7, 8, 9, 1, 2, 3])])
    if save:
        (folder / save).mkdir(exist_ok=True)
        trainer.sleep()
        trainer.save(str(folder / save))
        trainer.wake_up()
    return result | last(trainer)


def last(trainer: Trainer) -> Result:
    return {"last": train(trainer, LAST), "state": state(trainer), "last_pieces": pieces(trainer)}


def load(trainer: Trainer, folder: Path, saved: str) -> Result:
    resharded = trainer.load(str(folder / saved))
    return {"resharded": resharded, "loaded": pieces(trainer)} | last(trainer)


def scores(trainer: Trainer) -> list[Any]:
    return list(trainer.score([np.array([1, 2, 3, 4]), np.array([5, 6])]))


def run_adapters(trainer: Trainer, folder: Path, save: str = "") -> Result:
    """Same as `run`; scores with the adapters off, before and after; and the weights that a pass computed with."""
    result: Result = {"first_scores": scores(trainer)} | run(trainer, folder, save)
    seen = []

    def noting(weight: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        seen.append(merged(weight, change))
        return seen[-1]

    with mock.patch.object(adapters, "merged", noting):
        scores(trainer)
    backend = trainer.backend
    with backend.reference():
        result["reference_scores"] = scores(trainer)
    names = [f"{name}.weight" for name in adapters.adapters_of(backend.rank.model.module)]  # type: ignore[attr-defined]
    assert len(seen) == len(names)
    with backend.handing_over() as rounding:
        for piece in backend.pieces(backend.layout):
            piece.read()
    return result | {"computed_with": dict(zip(names, seen)), "rounding": rounding}


def run_apart(trainer: Trainer, folder: Path, save: str) -> Result:
    """Run as `run`, with adapters that are handed over alone; and the rows of A and B that this rank has."""
    result = run(trainer, folder, save)
    rank = trainer.backend.rank  # type: ignore[attr-defined]
    trained = {name: rows.clone() for name, rows in rank.shards.trained.items()}
    with trainer.backend.reference():
        result["reference_scores"] = scores(trainer)
    return result | {"trained": trained}


def refused(trainer: Trainer, folder: Path, saved: str) -> Result:
    """A state that is none of this job's changes nothing."""
    before = state(trainer)
    try:
        trainer.load(str(folder / saved))
    except ValueError as error:
        return {"message": str(error), "unchanged": same(before, state(trainer))}
    raise AssertionError("was loaded")


def stop_midway(trainer: Trainer, _folder: Path) -> Result:
    """A stop request reaches the first rank in the middle of a pass; all ranks leave with the state before the step."""
    train(trainer, 0)
    before, seen = state(trainer), 0
    model = trainer.backend.rank.model.module  # type: ignore[attr-defined]

    def count(*_args: Any) -> None:
        nonlocal seen
        seen += 1
        if trainer._rank == 0 and seen == 2:
            thread = threading.Thread(target=trainer.request_stop)
            thread.start()
            thread.join()

    hook = model.get_decoder().register_forward_hook(count)
    try:
        step(trainer, 1)
        stopped = False
    except StopRequested:
        stopped = True
    hook.remove()
    unchanged = same(before, state(trainer))
    report = step(trainer, 1)
    micro_batches = report.detail["micro_batches"]
    return {"stopped": stopped, "unchanged": unchanged, "computed": seen, "micro_batches": micro_batches}


def non_finite(trainer: Trainer, _folder: Path) -> Result:
    """A loss and a gradient that are not finite leave everything as it was."""
    train(trainer, 0)
    before = state(trainer)
    batch = make_batch(1)
    batch.advantages[3] = np.nan
    reports = [trainer.train(batch, SAMPLING, 2)]
    model = trainer.backend.rank.model  # type: ignore[attr-defined]
    take = model.take_gradients

    def spoiled() -> dict[str, torch.Tensor]:
        gradients: dict[str, torch.Tensor] = take()
        gradients["model.norm.weight"] *= torch.inf
        return gradients

    with mock.patch.object(model, "take_gradients", spoiled):
        reports.append(trainer.train(make_batch(1), SAMPLING, 2))
    return {"reports": reports, "unchanged": same(before, state(trainer)), "then": train(trainer, 1)}


def on_host(*args: Any, **kwargs: Any) -> optimizer.ShardedAdamW:
    """The optimizer as on a device with memory of its own, and in many buckets."""
    assert kwargs.pop("overlap") is None, "on the CPU there is nowhere to move it"
    with mock.patch.object(state_buckets, "BUCKET_ELEMENTS", 10_000):
        made = optimizer.ShardedAdamW(*args, **kwargs, overlap=CpuDevice().overlap)
    assert len(made._buckets) > 2
    return made


def copies_of(shards: int) -> AbstractContextManager[object]:
    def of_training(training: Any, world_size: int, rank: int = 0) -> ParallelLayout:
        return ParallelLayout(world_size, rank=rank, shards=shards)

    return mock.patch.object(ParallelLayout, "of_training", of_training)


FSDP = {"backend": "FSDP"} | MANY_TERMS
CONTEXT = FSDP | {"contextParallel": 2}
LORA = FSDP | {"lora": {"rank": 5, "alpha": 20}}
APART = FSDP | {"lora": {"rank": 8, "alpha": 24, "handover": "Adapters"}}
Case = tuple[int, str, dict[str, Any], Callable[[Trainer, Path], Result]]
"""Ranks, model, training, what is done."""
CASES: dict[str, Case] = {
    "megatron": (1, "dense", MANY_TERMS, lambda t, f: run(t, f, "from_megatron")),
    "megatron_moe": (1, "moe", MANY_TERMS, run),
    "one": (1, "dense", FSDP, run),
    "one_recompute": (1, "dense", FSDP | {"recompute": "Full"}, run),
    "one_offload": (1, "dense", FSDP | {"optimizer": {"hostOffload": True}}, run),
    "two": (2, "dense", FSDP, lambda t, f: run(t, f, "from_two")),
    "two_blocks": (2, "dense", FSDP, run),
    "two_kept": (2, "dense", FSDP | {"fsdp": {"reshardAfterForward": False}}, run),
    "context": (2, "dense", CONTEXT | {"recompute": "Full"}, run),
    "context_four": (4, "moe", CONTEXT, run),
    "context_copies": (4, "dense", CONTEXT | {"fsdp": {"shardSize": 1}}, run),
    "context_released": (2, "dense", CONTEXT | {"memorySaver": {"releaseProcessGroups": True}}, run),
    "context_stop": (4, "dense", CONTEXT | {"maxTokensPerMicroBatch": 12}, stop_midway),
    "context_copies_stop": (
        4,
        "dense",
        CONTEXT | {"fsdp": {"shardSize": 1}, "maxTokensPerMicroBatch": 12},
        stop_midway,
    ),
    "two_moe": (2, "moe", FSDP, run),
    "two_bf16": (2, "dense", FSDP | {"precision": "bf16"}, run),
    "two_fillers": (2, "dense", FSDP | {"maxTokensPerMicroBatch": 16, "globalBatchSize": 2}, run),
    "megatron_fillers": (1, "dense", MANY_TERMS | {"maxTokensPerMicroBatch": 16, "globalBatchSize": 2}, run),
    "two_resumed": (2, "dense", FSDP, lambda t, f: load(t, f, "from_two")),
    "two_to_one": (1, "dense", FSDP, lambda t, f: load(t, f, "from_two")),
    "two_to_megatron": (1, "dense", MANY_TERMS, lambda t, f: load(t, f, "from_two")),
    "megatron_to_two": (2, "dense", FSDP, lambda t, f: load(t, f, "from_megatron")),
    "stop": (2, "dense", FSDP | {"maxTokensPerMicroBatch": 24}, stop_midway),
    "non_finite": (1, "dense", {"backend": "FSDP"}, non_finite),
    "three": (3, "dense", FSDP, lambda t, f: run(t, f, "from_three")),
    "three_moe": (3, "moe", FSDP, run),
    "two_to_three": (3, "dense", FSDP, lambda t, f: load(t, f, "from_two")),
    "three_to_one": (1, "dense", FSDP, lambda t, f: load(t, f, "from_three")),
    "tp": (2, "dense", MANY_TERMS | {"tensorParallel": 2}, lambda t, f: run(t, f, "from_tp")),
    "tp_to_three": (3, "dense", FSDP, lambda t, f: load(t, f, "from_tp")),
    "two_by_two": (4, "dense", FSDP, lambda t, f: run(t, f, "from_copies")),
    "two_by_two_resumed": (4, "dense", FSDP, lambda t, f: load(t, f, "from_copies")),
    "two_by_two_moe": (4, "moe", FSDP, run),
    "two_by_two_stop": (4, "dense", FSDP | {"maxTokensPerMicroBatch": 8}, stop_midway),
    "lora": (1, "dense", LORA, run_adapters),
    "lora_two": (2, "dense", LORA, lambda t, f: run_adapters(t, f, "from_lora")),
    "lora_blocks": (2, "dense", LORA, run_adapters),
    "lora_bf16": (2, "dense", LORA | {"precision": "bf16", "recompute": "Full"}, run_adapters),
    "lora_elsewhere": (2, "other", LORA, lambda t, f: refused(t, f, "from_lora")),
    "lora_rank": (2, "dense", FSDP | {"lora": {"rank": 4, "alpha": 20}}, lambda t, f: refused(t, f, "from_lora")),
    "lora_none": (2, "dense", FSDP, lambda t, f: refused(t, f, "from_lora")),
    "lora_megatron": (2, "dense", MANY_TERMS, lambda t, f: refused(t, f, "from_lora")),
    "lora_resumed": (2, "dense", LORA, lambda t, f: load(t, f, "from_lora")),
    "lora_to_one": (1, "dense", LORA, lambda t, f: load(t, f, "from_lora")),
    "lora_three": (3, "dense", LORA, run_adapters),
    "lora_two_by_two": (4, "dense", LORA, run_adapters),
    "lora_two_by_two_moe": (4, "moe", LORA, run_adapters),
    "lora_eight": (1, "dense", FSDP | {"lora": {"rank": 8, "alpha": 24}}, run),
    "lora_apart": (2, "dense", APART, lambda t, f: run_apart(t, f, "from_apart")),
    "lora_apart_resumed": (2, "dense", APART, lambda t, f: load(t, f, "from_apart")),
    "lora_context": (2, "dense", LORA | {"contextParallel": 2, "recompute": "Full"}, run_adapters),
    "lora_released": (2, "dense", LORA | {"memorySaver": {"releaseProcessGroups": True}}, run_adapters),
    "two_released": (2, "dense", FSDP | {"memorySaver": {"releaseProcessGroups": True}}, run),
}


def around(case: str) -> AbstractContextManager[object]:
    if "two_by_two" in case:
        return copies_of(2)
    if "blocks" in case:
        # One row's logits are kept, and those of three others are there at once.
        return mock.patch.object(Blocks, "of", return_value=Blocks(1, 3))
    return mock.patch.object(rank_state, "ShardedAdamW", on_host) if "offload" in case else nullcontext()


def _meet(rank: int, begun: Path) -> None:
    """Wait until the first rank is there, which other cases may hold up."""
    if rank == 0:
        begun.touch()
    deadline = time.monotonic() + DEADLINE
    while not begun.exists():
        assert time.monotonic() < deadline, f"{begun.name}: the first rank did not come within {DEADLINE:g} s"
        time.sleep(0.05)


def main(rank: int, folder: Path, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    for case in cases:
        world, model, training, do = CASES[case]
        if rank >= world:
            continue
        _meet(rank, folder / f"{case}.begun")
        print(f"rank {rank}: {case}", flush=True)
        with around(case):
            trainer = make_trainer(case, model, rank, world, folder, **training)
            result = do(trainer, folder)
        trainer.close()
        torch.save(result, folder / f"{case}.rank-{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
