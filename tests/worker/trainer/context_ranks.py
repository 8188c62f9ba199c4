"""Loss, gradients and log-probabilities where ranks divide each row of samples, and of one rank that has one sample in
a micro-batch; `test_context_parallel.py` compares them.

Called as `python context_ranks.py RANK RANKS FOLDER CASE...`; writes `FOLDER/CASE.rank-N.pt` for each case.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from cases import SAMPLES, SAMPLING, Process, Result, pieces, state
from packing_ranks import GSPO, REPLAY, ROW, grouped_batch, shared_segments, shared_step

from rljob_worker.trainer.planned_step import PlannedStep
from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import TrainBatch

MOE, HYBRID = {"model": "moe"}, {"model": "hybrid"}
ALONE: dict[str, dict[str, Any]] = {"dense": {}, "moe": MOE, "replay": REPLAY, "hybrid": HYBRID}
"""Cases of one rank, whose samples are micro-batches of their own."""
CELLS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "cp": (2, "dense", {}),
    "cp_full": (2, "dense", {"recompute": "Full"}),
    "cp_hybrid": (2, "hybrid", {"recompute": "Full"}),
    "cp_ep": (2, "moe", {"expertParallel": 2}),
    "cp_replay": (2, "replay", {"recompute": "Full"}),
    "cp_tp": (4, "dense", {"tensorParallel": 2}),
    "cp_pp": (4, "dense", {"pipelineParallel": 2, "recompute": "Selective"}),
    "cp_dp": (4, "dense", {}),
    "cp_tp_hybrid": (4, "hybrid", {"tensorParallel": 2}),
    "cp_tp_replay": (4, "replay", {"tensorParallel": 2}),
    "cp_tp_ep": (4, "replay", {"tensorParallel": 2, "expertParallel": 4, "recompute": "Selective"}),
    "cp_pp_ep": (4, "moe", {"pipelineParallel": 2, "expertParallel": 2}),
    "cp4": (4, "dense", {"contextParallel": 4}),
    "cp4_ep": (4, "replay", {"contextParallel": 4, "expertParallel": 2}),
    "cp4_pp": (8, "dense", {"contextParallel": 4, "pipelineParallel": 2}),
    "cp_tp_pp": (8, "dense", {"tensorParallel": 2, "pipelineParallel": 2, "recompute": "Full"}),
    "cp_tp_pp_ep": (8, "replay", {"tensorParallel": 2, "pipelineParallel": 2, "expertParallel": 4}),
    "cp_dp_ep": (8, "moe", {"tensorParallel": 2, "expertParallel": 4}),
}
"""Case -> ranks, the case of `ALONE` that it equals, and its `spec.training`; contextParallel 2 where not given."""
SAMPLE = 7
"""Bound on tokens that no two samples of the batch fit."""
EARLIER, SINCE = 1.03, 1.01
"""Factors of the starting weights, before the step and then within it: elements alike in each layout."""


def compared(process: Process, model: str = "dense", **training: Any) -> Result:
    """The first of a step's two updates."""
    trainer = process.trainer(model, algorithm=GSPO, globalBatchSize=SAMPLES // 2, **training)
    backend: Any = trainer.backend
    scale(backend, EARLIER)
    batch = grouped_batch(1, experts=trainer.spec.rollout.router_replay)
    result: Result = {}
    if process.world_size == 1:
        result["samples"] = measured(trainer, batch, SAMPLE)
    else:
        result["rows"] = measured(trainer, batch, ROW)
        if backend.segment_cost is not None:
            backend.segment_cost = 0.0
            result["shared"] = measured(trainer, batch, 2 * ROW)
    trainer.close()
    return result


def scale(backend: Any, factor: float) -> None:
    with torch.no_grad():
        for flat in backend.rank.parameters:
            flat.mul_(factor)


def measured(trainer: Trainer, batch: TrainBatch, bound: int) -> Result:
    training = trainer.spec.training.model_copy(update={"max_tokens_per_micro_batch": bound})
    trainer.spec = trainer.spec.model_copy(update={"training": training})
    trainer.planned = None
    trainer.ref_log_probs(batch, SAMPLING)
    trainer.log_probs(batch, SAMPLING)
    backend: Any = trainer.backend
    kept = [flat.clone() for flat in backend.rank.parameters]
    scale(backend, SINCE)
    planned = trainer.plan(batch)
    updates = planned.updates
    loss = planned.losses(trainer.spec, SAMPLING, trainer.passes.vocab_size, 2, 0)[0]
    rows = backend.pipeline.forward_backward(updates[0].micro_batches, loss)
    metrics = backend._updater._reduction.reduce(loss.names, rows)
    optimizer = backend.rank.optimizer
    optimizer.prepare_grads()
    result = {
        "micro_batches": len(updates[0].micro_batches),
        "shared_segments": shared_segments(trainer, batch),
        "metrics": metrics,
        "norm": float(optimizer.get_grad_norm()),
        "gradients": gradients(trainer),
        "log_probs": log_probs(planned),
    }
    for flat, before in zip(backend.rank.parameters, kept, strict=True):
        flat.copy_(before)
    return result


def log_probs(planned: PlannedStep) -> dict[str, torch.Tensor]:
    return {
        f"{kind} {sample}": values
        for kind, kept in (("old", planned.old_log_probs), ("reference", planned.reference_log_probs))
        for update, of_update in zip(planned.updates, kept or [], strict=True)
        for micro_batch, row in zip(update.micro_batches, of_update)
        for sample, values in zip(micro_batch.samples, row.split(micro_batch.mask.sum(1).tolist()), strict=True)
    }


def gradients(trainer: Trainer) -> list[Any]:
    """This rank's share of them, in the checkpoint's tensors: they take the parameters' place, which it reads."""
    backend: Any = trainer.backend
    ddp = backend.rank.ddp
    with torch.no_grad():
        for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers]:
            buffer.param_data.copy_(buffer.grad_data)
    # Each rank has the sums of its share of them.
    ddp.start_param_sync(force_sync=True)
    return pieces(trainer)


def steps_of(process: Process, **training: Any) -> Result:
    """The state after two steps in one go, and after the second one from a checkpoint of the first, slept on."""
    result: Result = {}
    folder = process.folder / "steps"
    for name, seeds in (("whole", (1, 2)), ("first", (1,)), ("second", (2,))):
        trainer = process.trainer(algorithm=GSPO, contextParallel=2, **training)
        if name == "second":
            trainer.load(str(folder))
            trainer.sleep()
            trainer.wake_up()
        result[name] = [shared_step(trainer, seed) for seed in seeds]
        if name == "first":
            trainer.sleep()
            folder.mkdir(exist_ok=True)
            trainer.save(str(folder))
        result[f"{name} state"] = state(trainer) if name != "first" else []
        trainer.close()
    return result


def main(rank: int, ranks: int, folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        print(f"rank {rank}: {name}", flush=True)
        process = Process(rank, ranks, folder, name)
        if name == "steps":
            result = steps_of(process, memorySaver={"releaseProcessGroups": True})
        elif name in ALONE:
            result = compared(process, **ALONE[name])
        else:
            _, alone, training = CELLS[name]
            result = compared(process, **ALONE[alone] | {"contextParallel": 2} | training)
        torch.save(result, folder / f"{name}.rank-{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
