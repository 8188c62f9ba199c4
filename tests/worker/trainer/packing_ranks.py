"""Loss, gradients and log-probabilities of rows, of rows with shared prompts, of rows whose output layer is computed in
blocks, and of one sample a micro-batch; `test_packing.py` compares them.

Called as `tests/worker/trainer/cases.py` is, with cells of `CELLS` for cases.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import numpy as np
import torch
from cases import MAX_RESPONSE, SAMPLES, SAMPLING, VOCAB, Process, Result, pieces, step, with_experts

from rljob_worker.algorithms import output_layer
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
"""Cases of two ranks, but for those whose names begin with `one`."""
ROW, SAMPLE = 24, 1
"""Bounds on tokens: by the second one, each sample is longer than a row."""
PROMPTS = (6, 4, 5, 7)
"""Tokens of each group's prompt."""


def grouped_batch(seed: int, *, experts: bool) -> TrainBatch:
    """Groups of four samples of one prompt, whose experts are equal too; some responses are of one token."""
    random = np.random.default_rng(seed)
    lengths = np.repeat(PROMPTS, SAMPLES // len(PROMPTS))
    responses = np.where(np.arange(SAMPLES) % 5 == 1, 1, random.integers(1, MAX_RESPONSE + 1, SAMPLES))
    prompts = [prompt for length in PROMPTS for prompt in [random.integers(0, VOCAB, length)] * (SAMPLES // 4)]
    batch = TrainBatch.of_responses(
        tokens=[np.concatenate([prompt, random.integers(0, VOCAB, r)]) for prompt, r in zip(prompts, responses)],
        prompt_lengths=lengths,
        rollout_log_probs=[(-3 - random.random(r)).astype(np.float32) for r in responses],
        advantages=random.standard_normal(SAMPLES).astype(np.float32),
    )
    if not experts:
        return batch
    batch = with_experts(batch, seed)
    assert batch.experts is not None
    starts = np.cumsum(batch.lengths) - batch.lengths - np.arange(SAMPLES)
    for sample, length in enumerate(lengths):
        first = starts[sample - sample % 4]
        batch.experts[starts[sample] : starts[sample] + length] = batch.experts[first : first + length]
    return batch


def compared(process: Process, model: str = "dense", **training: Any) -> Result:
    """The first update of a step from the same weights: in rows, with and without shared prompts, and in samples."""
    trainer = process.trainer(model, algorithm=GSPO, globalBatchSize=SAMPLES // 2, **training)
    # From here on the policy is not its reference any more.
    step(trainer, 0)
    batch = grouped_batch(1, experts=trainer.spec.rollout.router_replay)
    result = {name: measured(trainer, batch, bound) for name, bound in (("rows", ROW), ("samples", SAMPLE))}
    with blocks_of(3):
        result["blocks"] = measured(trainer, batch, ROW)
    backend: Any = trainer.backend
    if backend.segment_cost is not None:
        # Of a model as small as this one, kernels cost more than a prompt.
        backend.segment_cost = 0.0
        result |= {name: measured(trainer, batch, 2 * ROW) for name in ("shared", "again")}
    trainer.close()
    return result


def blocks_of(rows: int) -> Any:
    """Inside, the output layer keeps the logits of one row, and computes so many of the others at once."""
    return mock.patch.object(output_layer.Blocks, "of", return_value=output_layer.Blocks(1, rows))


def resumed(process: Process) -> Result:
    """The weights after two steps with shared prompts, in one go and with another process's trainer in between."""
    result: Result = {}
    folder = process.folder / "resumed"
    for name, seeds in (("whole", (1, 2)), ("first", (1,)), ("second", (2,))):
        trainer = process.trainer(algorithm=GSPO)
        backend: Any = trainer.backend
        backend.segment_cost = 0.0
        if name == "second":
            trainer.load(str(folder))
        result[name] = [shared_step(trainer, seed) for seed in seeds]
        if name == "first":
            folder.mkdir()
            trainer.save(str(folder))
        result[f"{name} weights"] = pieces(trainer)
        trainer.close()
    return result


def rectangles(process: Process) -> Result:
    """Metrics of a step in rows and, from the same weights, in the padded rectangles of the benchmarks."""
    sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
    from padded_plan import PaddedSide

    result: Result = {}
    for name in ("rows", "rectangles"):
        trainer = process.trainer(globalBatchSize=SAMPLES)
        side = trainer if name == "rows" else PaddedSide(trainer)
        result[name] = dict(side.train(cases.make_batch(1), SAMPLING, 2).metrics)
        trainer.close()
    return result


def shared_step(trainer: Trainer, seed: int) -> tuple[dict[str, float], int]:
    """Metrics, and how many segments of its rows went on from a prompt."""
    batch = grouped_batch(seed, experts=False)
    trainer.ref_log_probs(batch, SAMPLING)
    trainer.log_probs(batch, SAMPLING)
    found = shared_segments(trainer, batch)
    return dict(trainer.train(batch, SAMPLING, seed + 1).metrics), found


def shared_segments(trainer: Trainer, batch: TrainBatch) -> int:
    rows = [row for update in trainer.plan(batch).updates for row in update.micro_batches]
    return sum(int((row.prefixes >= 0).sum()) for row in rows if row.prefixes is not None)


def measured(trainer: Trainer, batch: TrainBatch, bound: int) -> Result:
    training = trainer.spec.training.model_copy(update={"max_tokens_per_micro_batch": bound})
    trainer.spec = trainer.spec.model_copy(update={"training": training})
    trainer.planned = None
    trainer.ref_log_probs(batch, SAMPLING)
    trainer.log_probs(batch, SAMPLING)
    planned = trainer.plan(batch)
    updates = planned.updates
    loss = planned.losses(trainer.spec, SAMPLING, trainer.passes.vocab_size, 2, 0)[0]
    backend: Any = trainer.backend
    rows = backend.pipeline.forward_backward(updates[0].micro_batches, loss)
    metrics = backend._updater._reduction.reduce(loss.names, rows)
    optimizer = backend.rank.optimizer
    optimizer.prepare_grads()
    own = [parameter.grad.flatten() for part in optimizer.chained_optimizers for parameter in part.get_parameters()]
    log_probs = {
        f"{kind} {sample}": values
        for kind, kept in (("old", planned.old_log_probs), ("reference", planned.reference_log_probs))
        for update, of_update in zip(updates, kept or [], strict=True)
        for micro_batch, row in zip(update.micro_batches, of_update)
        for sample, values in zip(micro_batch.samples, row.split(micro_batch.mask.sum(1).tolist()), strict=True)
    }
    return {
        "micro_batches": len(updates[0].micro_batches),
        "shared_segments": shared_segments(trainer, batch),
        "metrics": metrics,
        "norm": float(optimizer.get_grad_norm()),
        "gradients": torch.cat(own),
        "log_probs": log_probs,
    }


if __name__ == "__main__":
    cases.CASES |= {name: lambda process, cell=cell: compared(process, **cell) for name, cell in CELLS.items()}
    cases.CASES |= {"resumed": resumed, "rectangles": rectangles}
    cases.main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
