"""Loss, gradients and log-probabilities of rows, and of one sample a micro-batch; `test_packing.py` compares them.

Called as `tests/worker/trainer/cases.py` is, with cells of `CELLS` for cases.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cases
import torch
from cases import SAMPLES, SAMPLING, Process, Result, make_batch, step, with_experts

from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import TrainBatch

GSPO = {"name": "gspo", "kl": {"coefficient": 0.1}}
REPLAY: dict[str, Any] = {"model": "moe", "routerReplay": True}
CELLS: dict[str, dict[str, Any]] = {
    "one": {},
    "one_hybrid": {"model": "hybrid"},
    "one_replay": REPLAY | {"recompute": "Full"},
    "tp": {"tensorParallel": 2},
    "pp": {"pipelineParallel": 2, "recompute": "Full"},
    "dp": {},
    "tp_hybrid": {"model": "hybrid", "tensorParallel": 2},
    "pp_hybrid": {"model": "hybrid", "pipelineParallel": 2, "recompute": "Full"},
    "ep_replay": REPLAY | {"expertParallel": 2, "recompute": "Selective"},
    "tp_replay": REPLAY | {"tensorParallel": 2},
    "tp_ep": {"model": "moe", "tensorParallel": 2, "expertParallel": 2},
}
"""Of two ranks, but for those whose names begin with `one`."""
ROW, SAMPLE = 24, 1
"""Bounds on tokens: by the second one, each sample is longer than a row."""


def compared(process: Process, model: str = "dense", **training: Any) -> Result:
    """The first update of a step that is cut into rows, and into samples, from the same weights."""
    trainer = process.trainer(model, algorithm=GSPO, globalBatchSize=SAMPLES // 2, **training)
    # From here on the policy is not its reference any more.
    step(trainer, 0)
    batch = make_batch(1)
    if trainer.spec.rollout.router_replay:
        batch = with_experts(batch, 1)
    result = {name: measured(trainer, batch, bound) for name, bound in (("rows", ROW), ("samples", SAMPLE))}
    trainer.close()
    return result


def measured(trainer: Trainer, batch: TrainBatch, bound: int) -> Result:
    training = trainer.spec.training.model_copy(update={"max_tokens_per_micro_batch": bound})
    trainer.spec = trainer.spec.model_copy(update={"training": training})
    trainer._planned = None
    trainer.ref_log_probs(batch, SAMPLING)
    trainer.log_probs(batch, SAMPLING)
    updates = trainer._plan(batch)
    loss = trainer._loss(0, updates[0], SAMPLING, 2)
    backend: Any = trainer._backend
    rows = backend._pipeline.forward_backward(updates[0].micro_batches, loss)
    metrics = backend._updater._reduction.reduce(loss.names, rows)
    optimizer = backend.rank.optimizer
    optimizer.prepare_grads()
    own = [parameter.grad.flatten() for part in optimizer.chained_optimizers for parameter in part.get_parameters()]
    log_probs = {
        f"{kind} {sample}": values
        for kind, kept in (("old", trainer._old), ("reference", trainer._reference_log_probs))
        for update, of_update in zip(updates, kept or [], strict=True)
        for micro_batch, row in zip(update.micro_batches, of_update)
        for sample, values in zip(micro_batch.samples, row.split(micro_batch.mask.sum(1).tolist()), strict=True)
    }
    return {
        "micro_batches": len(updates[0].micro_batches),
        "metrics": metrics,
        "norm": float(optimizer.get_grad_norm()),
        "gradients": torch.cat(own),
        "log_probs": log_probs,
    }


if __name__ == "__main__":
    cases.CASES |= {name: lambda process, cell=cell: compared(process, **cell) for name, cell in CELLS.items()}
    cases.main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
