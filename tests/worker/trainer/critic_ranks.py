"""Runs the critic's cases in processes of their own, as `fsdp_ranks.py` does; `test_critic.py` starts it."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import fsdp_ranks
import numpy as np
import torch
from cases import MAX_RESPONSE, SAMPLES, SAMPLING, VOCAB, Result, make_spec, same
from fsdp_ranks import pieces, state

from rljob_worker.errors import StopRequested
from rljob_worker.memory.arena import Arena
from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import StepMetrics, TrainBatch

CRITIC = {"updatesPerStep": 4, "valueClip": 0.02, "optimizer": {"lr": 3e-3, "clipGrad": 0.5}}


def episodes(seed: int) -> TrainBatch:
    """Streams of one to three turns, with observations between them, and a reward each."""
    random = np.random.default_rng(seed)
    turns = random.integers(1, 4, SAMPLES)
    flags = [
        np.concatenate(
            [
                np.repeat([False, True], [random.integers(1, 4), random.integers(1, MAX_RESPONSE // turns[index] + 1)])
                for _ in range(turns[index])
            ]
        )
        for index in range(SAMPLES)
    ]
    sampled = np.concatenate(flags)
    count = int(sampled.sum())
    return TrainBatch(
        tokens=random.integers(0, VOCAB, len(sampled)),
        lengths=np.array([len(one) for one in flags]),
        sampled=sampled,
        rollout_log_probs=(-3 - random.random(count)).astype(np.float32),
        advantages=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int64),
        rewards=random.random(SAMPLES).astype(np.float32),
    )


def make_trainer(case: str, model: str, rank: int, world: int, folder: Path, **given: Any) -> Trainer:
    critic, warm = given.pop("critic", CRITIC), given.pop("valued", True)
    algorithm = {"name": "ppo", "gae": {"gamma": 0.97, "lambda": 0.9}, "aggregation": "SequenceMean"}
    spec = make_spec(world, **{"backend": "FSDP", "algorithm": algorithm} | given)
    trainer = Trainer(
        spec | {"critic": critic},
        rank=rank,
        world_size=world,
        store=f"file://{folder}/store-{case}",
        secret="of-a-test",
        model_folder=str(folder / model),
        critic_folder=str(folder / f"{model}_valued") if warm else None,
        total_updates=100,
    )
    trainer.setup()
    return trainer


def of_critic(trainer: Trainer) -> list[torch.Tensor]:
    backend = trainer.backend.critic
    assert backend is not None
    return [tensor.clone() for tensor in (*backend.trained, *backend.optimizer_state)]


def whole(trainer: Trainer) -> list[torch.Tensor]:
    return [*state(trainer), *of_critic(trainer)]


def step(trainer: Trainer, seed: int) -> tuple[StepMetrics, dict[str, Any]]:
    """A step as `driver.learn` makes it; its report, and the numbers of its tokens."""
    batch = episodes(seed)
    trainer.values(batch)
    assert trainer._critic is not None
    known = trainer._critic._known(batch)
    seen = {"values": known.values, "returns": known.estimates.returns, "advantages": known.advantages}
    trainer.log_probs(batch, SAMPLING)
    beside = trainer.critic_train(batch, alone=False)
    assert beside.applied, beside.detail
    report = trainer.train(batch, SAMPLING, seed + 1)
    assert report.applied, report.detail
    report.metrics.update(beside.metrics)
    return report, seen


def run(trainer: Trainer, folder: Path, save: str = "") -> Result:
    """Two steps with a nap after each; saved asleep where that is asked for; and another step."""
    result: Result = {"steps": [], "naps": []}
    for seed in range(2):
        report, seen = step(trainer, seed)
        result["steps"].append({"metrics": report.metrics} | seen)
        before = whole(trainer)
        trainer.sleep()
        arena = trainer.backend.memory
        assert isinstance(arena, Arena)
        resident = arena.resident_bytes()
        if save and seed:
            (folder / save).mkdir(exist_ok=True)
            files = trainer.save(str(folder / save))
            result["files"] = [file.name for file in files]
        trainer.wake_up()
        result["naps"].append((resident, same(before, whole(trainer))))
    return result | last(trainer)


def last(trainer: Trainer) -> Result:
    report, seen = step(trainer, 7)
    return {"last": report.metrics, "state": whole(trainer), "last_pieces": pieces(trainer)} | {"last_seen": seen}


def load(trainer: Trainer, folder: Path, saved: str) -> Result:
    return {"resharded": trainer.load(str(folder / saved))} | last(trainer)


def between(trainer: Trainer, folder: Path) -> Result:
    """Saved after the critic's updates and before the policy's; then a policy that fails; then one that is stopped."""
    step(trainer, 0)
    before, result = whole(trainer), Result()
    batch = episodes(1)

    def half() -> None:
        trainer.values(batch)
        trainer.log_probs(batch, SAMPLING)
        assert trainer.critic_train(batch, alone=False).applied
        result["moved"] = not same(before, whole(trainer))

    half()
    (folder / "between").mkdir(exist_ok=True)
    trainer.save(str(folder / "between"))
    result["saved"] = same(before, whole(trainer))
    half()
    with spoiled(trainer.backend, torch.inf):
        result["policy"] = trainer.train(batch, SAMPLING, 2)
    result["after_policy"] = same(before, whole(trainer))
    half()
    trainer.request_stop()
    try:
        trainer.train(batch, SAMPLING, 2)
        result["stopped"] = False
    except StopRequested:
        result["stopped"] = True
    result["after_stop"] = same(before, whole(trainer))
    trainer.values(batch)
    with spoiled(trainer.backend.critic, torch.nan):
        result["critic"] = trainer.critic_train(batch, alone=False)
    result["after_critic"] = same(before, whole(trainer))
    trainer.values(batch)
    result["alone"] = trainer.critic_train(batch, alone=True)
    (folder / "alone").mkdir(exist_ok=True)
    trainer.save(str(folder / "alone"))
    now = whole(trainer)
    result["policy_kept"] = same(now[: len(state(trainer))], before[: len(state(trainer))])
    result["critic_kept"] = not same(now, before)
    return result


def spoiled(part: Any, factor: float) -> AbstractContextManager[object]:
    """Gradients of one of the rank's models are not finite."""
    rank = part.rank
    if hasattr(rank, "ddp"):
        owner, name = rank.optimizer, "prepare_grads"
    else:
        owner, name = rank.model, "take_gradients"
    take = getattr(owner, name)

    def taken() -> Any:
        if hasattr(rank, "ddp"):
            rank.ddp.module.decoder.layers[0].input_layernorm.weight.main_grad.mul_(factor)
            return take()
        gradients = take()
        gradients["model.layers.0.input_layernorm.weight"] *= factor
        return gradients

    return mock.patch.object(owner, name, taken)


def fresh(trainer: Trainer, _folder: Path) -> Result:
    """A critic that starts from the policy's folder: all values 0, and they move."""
    first, seen = step(trainer, 0)
    _, then = step(trainer, 0)
    return {"values": seen["values"], "then": then["values"], "metrics": first.metrics}


MEGATRON = {"backend": "Megatron"}
TP2, PP2 = MEGATRON | {"tensorParallel": 2}, MEGATRON | {"pipelineParallel": 2}
fsdp_ranks.make_trainer = make_trainer  # type: ignore[assignment]
fsdp_ranks.CASES = {
    "one": (1, "dense", {}, run),
    "two": (2, "dense", {}, lambda t, f: run(t, f, "from_two")),
    "two_resumed": (2, "dense", {}, lambda t, f: load(t, f, "from_two")),
    "two_to_one": (1, "dense", {}, lambda t, f: load(t, f, "from_two")),
    "between": (2, "dense", {}, between),
    "fresh": (1, "moe", {"valued": False}, fresh),
    "lora": (1, "dense", {"lora": {"rank": 4, "alpha": 8}, "precision": "bf16", "recompute": "Full"}, run),
    "tp2": (2, "dense", TP2, lambda t, f: run(t, f, "from_tp2")),
    "tp2_resumed": (2, "dense", TP2, lambda t, f: load(t, f, "from_tp2")),
    "tp2_to_fsdp": (2, "dense", {}, lambda t, f: load(t, f, "from_tp2")),
    "pp2": (2, "dense", PP2, run),
    "two_to_pp2": (2, "dense", PP2, lambda t, f: load(t, f, "from_two")),
    "tp2_between": (2, "dense", TP2, between),
    "experts": (2, "moe", {"precision": "fp32"}, run),
    "experts_tp2": (2, "moe", TP2, run),
    "experts_ep2": (2, "moe", MEGATRON | {"expertParallel": 2}, run),
    "cp2": (2, "dense", MEGATRON | {"contextParallel": 2}, run),
    "fsdp_cp2": (2, "dense", {"contextParallel": 2}, run),
    "megatron": (2, "dense", MEGATRON | {"maxTokensPerMicroBatch": 16}, run),
    "two_updates": (2, "dense", {"globalBatchSize": 8, "maxTokensPerMicroBatch": 16}, run),
    "three": (3, "dense", {"critic": CRITIC | {"updatesPerStep": 2}, "globalBatchSize": 8}, run),
    "two_to_three": (3, "dense", {}, lambda t, f: load(t, f, "from_two")),
    "released": (2, "dense", {"memorySaver": {"releaseProcessGroups": True}}, run),
}

if __name__ == "__main__":
    fsdp_ranks.main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
