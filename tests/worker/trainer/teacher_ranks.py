"""Runs a teacher's cases in processes of their own, as `fsdp_ranks.py` does; `test_teacher.py` starts it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import fsdp_ranks
import torch
from cases import SAMPLING, Result, make_batch, make_spec, same
from fsdp_ranks import pieces, state

from rljob_worker.errors import StopRequested
from rljob_worker.memory.arena import Arena
from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import StepMetrics

VOCAB = 31
ALGORITHM = {"name": "distill", "aggregation": "SequenceMean", "tis": {"enabled": False}, "normalizeByStd": False}
ALL_TOKENS = {"divergence": "TopK", "topK": VOCAB, "coefficient": 0.5, "rewardWeight": 0.3}
FEW = {"divergence": "TopK", "topK": 4}
SAMPLED = {"divergence": "Sampled", "coefficient": 0.5, "rewardWeight": 0.3}


def make_trainer(case: str, model: str, rank: int, world: int, folder: Path, **given: Any) -> Trainer:
    teacher = str(folder / given.pop("teacher", "teacher"))
    algorithm = ALGORITHM | {"distill": {"teacher": {"path": teacher}} | given.pop("distill", ALL_TOKENS)}
    trainer = Trainer(
        make_spec(world, algorithm=algorithm, **given),
        rank=rank,
        world_size=world,
        store=f"file://{folder}/store-{case}",
        secret="of-a-test",
        model_folder=str(folder / model),
        teacher_folder=teacher,
        total_updates=100,
    )
    trainer.setup()
    return trainer


def resident(trainer: Trainer) -> int:
    teacher = trainer.backend.teacher
    return int(cast(Any, teacher)._weights.resident_bytes)


def step(trainer: Trainer, seed: int) -> StepMetrics:
    batch = make_batch(seed)
    assert resident(trainer) == 0
    trainer.teacher_log_probs(batch, SAMPLING)
    assert resident(trainer) == 0
    trainer.log_probs(batch, SAMPLING)
    report = trainer.train(batch, SAMPLING, seed + 1)
    assert report.applied, report.detail
    return report


def run(trainer: Trainer, folder: Path, save: str = "") -> Result:
    """Three steps with a nap after each; saved asleep where that is asked for; and another step."""
    result: Result = {"metrics": [], "naps": []}
    for seed in range(3):
        result["metrics"].append(step(trainer, seed).metrics)
        before = state(trainer)
        trainer.sleep()
        asleep = cast(Arena, trainer.backend.memory).resident_bytes()
        if save and seed == 2:
            (folder / save).mkdir(exist_ok=True)
            trainer.save(str(folder / save))
        trainer.wake_up()
        result["naps"].append((asleep, same(before, state(trainer))))
    result["pieces"] = pieces(trainer)
    return result | last(trainer)


def last(trainer: Trainer) -> Result:
    return {"last": step(trainer, 7).metrics, "last_pieces": pieces(trainer)}


def load(trainer: Trainer, folder: Path, saved: str) -> Result:
    return {"resharded": trainer.load(str(folder / saved))} | last(trainer)


def learns(trainer: Trainer, _folder: Path) -> Result:
    """The same samples again and again."""
    batch, distances = make_batch(0), []
    for version in range(40):
        trainer.teacher_log_probs(batch, SAMPLING)
        trainer.log_probs(batch, SAMPLING)
        distances.append(trainer.train(batch, SAMPLING, version + 1).metrics["train/teacher_kl"])
    return {"distances": distances}


def refused(trainer: Trainer, _folder: Path) -> Result:
    """A step without its teacher's pass; a stop in that pass; a teacher that says what is no number."""
    step(trainer, 0)
    before, batch, result = state(trainer), make_batch(1), Result()
    trainer.log_probs(batch, SAMPLING)
    try:
        trainer.train(batch, SAMPLING, 2)
    except RuntimeError as error:
        result["message"] = str(error)
    trainer.request_stop()
    try:
        trainer.teacher_log_probs(batch, SAMPLING)
        result["stopped"] = False
    except StopRequested:
        result["stopped"] = True
    result["left"] = resident(trainer)
    trainer.teacher_log_probs(batch, SAMPLING)
    assert trainer.planned is not None
    for update in trainer.planned.updates:
        for one in update.micro_batches:
            if one.teacher is not None:
                one.teacher[:] = torch.nan
    trainer.log_probs(batch, SAMPLING)
    result["applied"] = trainer.train(batch, SAMPLING, 2).applied
    return result | {"unchanged": same(before, state(trainer))}


MEGATRON, FSDP = {"backend": "Megatron"}, {"backend": "FSDP"}
TWO_UPDATES = {"globalBatchSize": 8}
fsdp_ranks.make_trainer = make_trainer  # type: ignore[assignment]
fsdp_ranks.CASES = {
    "megatron": (1, "dense", MEGATRON | TWO_UPDATES, run),
    "megatron_tp": (2, "dense", MEGATRON | TWO_UPDATES | {"tensorParallel": 2}, lambda t, f: run(t, f, "from_tp")),
    "megatron_tp_resumed": (
        2,
        "dense",
        MEGATRON | TWO_UPDATES | {"tensorParallel": 2},
        lambda t, f: load(t, f, "from_tp"),
    ),
    "megatron_pp": (2, "dense", MEGATRON | TWO_UPDATES | {"pipelineParallel": 2}, run),
    "megatron_cp": (2, "dense", MEGATRON | TWO_UPDATES | {"contextParallel": 2}, run),
    "megatron_few": (1, "dense", MEGATRON | {"distill": FEW}, run),
    "megatron_sampled": (2, "dense", MEGATRON | TWO_UPDATES | {"distill": SAMPLED}, run),
    "fsdp": (2, "dense", FSDP | TWO_UPDATES, lambda t, f: run(t, f, "from_fsdp")),
    "fsdp_resumed": (2, "dense", FSDP | TWO_UPDATES, lambda t, f: load(t, f, "from_fsdp")),
    "fsdp_few": (2, "dense", FSDP | {"distill": FEW}, run),
    "fsdp_sampled": (1, "dense", FSDP | TWO_UPDATES | {"distill": SAMPLED}, run),
    "fsdp_cp": (2, "dense", FSDP | TWO_UPDATES | {"contextParallel": 2}, run),
    "fsdp_lora": (2, "dense", FSDP | {"lora": {"rank": 4, "alpha": 8}}, run),
    "fsdp_moe": (2, "moe", FSDP, run),
    "learns": (1, "dense", FSDP | {"distill": FEW, "optimizer": {"lr": 5e-3}}, learns),
    "refused": (2, "dense", FSDP, refused),
    "megatron_refused": (2, "dense", MEGATRON | {"tensorParallel": 2}, refused),
}

if __name__ == "__main__":
    fsdp_ranks.main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
