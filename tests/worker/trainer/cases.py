"""Runs trainer cases in processes of their own; `test_trainer.py` starts it and compares what it wrote.

Called as `python cases.py RANK FOLDER LAUNCH CASE...` in two processes; a case named `alone:CASE` has one rank, the
others two. The ranks of each trainer meet in a file of FOLDER, whose name begins with the launch's. Each rank writes
what it saw to `FOLDER/CASE.rank-N.pt`.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from support.brought import Brought

from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.errors import StopRequested
from rljob_worker.memory.sleeping import Region
from rljob_worker.trainer import state_buckets
from rljob_worker.trainer.batches import PackedBatch
from rljob_worker.trainer.megatron import rank_state
from rljob_worker.trainer.megatron.models.convert import local_pieces
from rljob_worker.trainer.megatron.optimizer_state import OptimizerState
from rljob_worker.trainer.objective import LogProbs
from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import SamplingParams, StepMetrics, TrainBatch

SAMPLING = SamplingParams(max_tokens=10)
SAMPLES = 16
MAX_PROMPT, MAX_RESPONSE, VOCAB = 6, 10, 31
Result = dict[str, Any]


def make_spec(world_size: int, **training: Any) -> dict[str, Any]:
    algorithm = training.pop("algorithm", {})
    replay = training.pop("routerReplay", False)
    memory = {"trainMemoryMargin": "0"} | training.pop("memorySaver", {})
    # A larger epsilon than the default: Adam turns rounding noise of vanishing gradients into whole steps.
    optimizer = {"lr": 1e-3, "weightDecay": 0.1, "eps": 1e-6} | training.pop("optimizer", {})
    return {
        "steps": 10,
        "model": {"random": {"config": {"model_type": "qwen3"}}},
        "data": {"synthetic": {}},
        "reward": {"name": "match"},
        "rollout": {
            "promptsPerStep": SAMPLES // 4,
            "samplesPerPrompt": 4,
            "maxResponseTokens": MAX_RESPONSE,
            "routerReplay": replay,
        },
        "algorithm": algorithm,
        "training": {"precision": "fp32", "maxTokensPerMicroBatch": 48, "optimizer": optimizer} | training,
        "resources": {"profile": "cpu", "devicesPerNode": world_size},
        "memorySaver": memory,
        "timeouts": {"startSeconds": 60, "phaseSeconds": 60},
    }


def make_batch(seed: int) -> TrainBatch:
    random = np.random.default_rng(seed)
    prompts = random.integers(1, MAX_PROMPT + 1, SAMPLES)
    responses = random.integers(1, MAX_RESPONSE + 1, SAMPLES)
    return TrainBatch.of_responses(
        tokens=[random.integers(0, VOCAB, p + r) for p, r in zip(prompts, responses)],
        prompt_lengths=prompts,
        rollout_log_probs=[(-3 - random.random(r)).astype(np.float32) for r in responses],
        advantages=random.standard_normal(SAMPLES).astype(np.float32),
    )


def with_experts(batch: TrainBatch, seed: int) -> TrainBatch:
    """Two of the model's four experts for each token in each of its two layers, whatever its routers say."""
    scores = np.random.default_rng(seed).random((len(batch.tokens) - len(batch), 2, 4))
    return replace(batch, experts=scores.argsort(axis=-1)[..., :2].astype(np.uint8))


class Process:
    """This process among the ranks of a launch.

    Args:
        rank: its number.
        world_size: how many ranks there are.
        folder: with the models, and where the ranks meet.
        name: of these ranks among all that meet there.
    """

    def __init__(self, rank: int, world_size: int, folder: Path, name: str) -> None:
        self.rank, self.world_size, self.folder, self.name = rank, world_size, folder, name
        self._made = 0

    def trainer(self, model: str = "dense", **training: Any) -> Trainer:
        self._made += 1
        trainer = Trainer(
            make_spec(self.world_size, **training),
            rank=self.rank,
            world_size=self.world_size,
            store=f"file://{self.folder}/store-{self.name}-{self._made}",
            secret="of-a-test",
            model_folder=str(self.folder / model),
            total_updates=100,
        )
        trainer.setup()
        return trainer


def step(trainer: Trainer, seed: int) -> StepMetrics:
    batch = make_batch(seed)
    if trainer.spec.rollout.router_replay:
        batch = with_experts(batch, seed)
    if trainer.spec.algorithm.kl.coefficient > 0 or trainer.spec.algorithm.kl.monitor:
        trainer.ref_log_probs(batch, SAMPLING)
    trainer.log_probs(batch, SAMPLING)
    return trainer.train(batch, SAMPLING, seed + 1, reported=SAMPLES - 1)


def pieces(trainer: Trainer) -> list[tuple[str, tuple[int, ...], int | None, int, torch.Tensor]]:
    """This rank's share of the HF checkpoint."""
    rank = trainer.backend.rank
    return [
        (p.hf_name, p.hf_shape, p.dim, p.start, p.read().clone())
        for p in local_pieces(rank.ddp.module, rank.config, rank.layout)
        if p.primary
    ]


def state(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of everything that training changes."""
    rank = trainer.backend.rank
    tensors = [*rank.parameters, *rank.state.flats, *(shard.step for shard in rank.state.shards)]
    return [tensor.clone() for tensor in tensors]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after))


def steps(process: Process, count: int = 3, model: str = "dense", **training: Any) -> Result:
    trainer = process.trainer(model, **training)
    reports = [step(trainer, seed) for seed in range(count)]
    scores = trainer.score([np.array([1, 2, 3, 4]), np.array([5, 6]), np.array([7, 8, 9, 1, 2, 3])])
    result = {
        "metrics": [report.metrics for report in reports],
        "applied": [report.applied for report in reports],
        "told": [{} if report.log_probs is None else report.log_probs.by_sample() for report in reports],
        "micro_batches": reports[0].detail["micro_batches"],
        "scores": scores,
        "pieces": pieces(trainer),
    }
    trainer.close()
    return result


def offload_moved(process: Process, **training: Any) -> Result:
    """Train as on a device with memory of its own: the state is brought there for each update, bucket by bucket."""
    with (
        mock.patch.object(rank_state, "OptimizerState", _StateOnHost),
        mock.patch.object(state_buckets, "BUCKET_ELEMENTS", 10_000),
    ):
        return steps(process, optimizer={"hostOffload": True}, **training) | {"state": _StateOnHost.seen}


class _StateOnHost(OptimizerState):
    """Counts what is brought for an update."""

    seen: dict[str, int]

    def __init__(self, optimizer: Any, ddp: Any, region: Region, *, overlap: None) -> None:
        assert overlap is None, "on the CPU there is nowhere to move it"
        super().__init__(optimizer, ddp, region, overlap=CpuDevice().overlap)
        sizes = [sum(entry.main.numel() for entry in self._entries[bucket]) for bucket in self._buckets]
        buffers = max(sizes[0::2]) + max(sizes[1::2])
        _StateOnHost.seen = {"tensors": len(self.flats), "buffers": buffers, "all": sum(sizes), "peak": 0}

    def apply(self) -> None:
        with Brought() as brought:
            super().apply()
        _StateOnHost.seen["peak"] = max(_StateOnHost.seen["peak"], brought.peak)


MANY_TERMS = {
    "globalBatchSize": SAMPLES // 2,
    "algorithm": {"kl": {"coefficient": 0.1}, "entropyCoefficient": 0.01, "aggregation": "SequenceMean"},
}


def stop_midway(process: Process, **training: Any) -> Result:
    """A stop request reaches one rank in the middle of a pass; all ranks leave with the state before the step."""
    trainer = process.trainer(maxTokensPerMicroBatch=16, **training)
    step(trainer, 0)
    before, asked, seen = state(trainer), process.rank == 0, 0

    def count(*_args: Any) -> None:
        nonlocal seen
        seen += 1
        if asked and seen == 2:
            thread = threading.Thread(target=trainer.request_stop)
            thread.start()
            thread.join()

    hook = trainer.backend.rank.ddp.module.decoder.register_forward_hook(count)
    stopped = False
    try:
        step(trainer, 1)
    except StopRequested:
        stopped = True
    hook.remove()
    unchanged = same(before, state(trainer))
    report = step(trainer, 1)
    result = {
        "stopped": stopped,
        "unchanged": unchanged,
        "computed": seen,
        "micro_batches": report.detail["micro_batches"],
        "applied": report.applied,
        "pieces": pieces(trainer),
    }
    trainer.close()
    return result


def stop_after_update(process: Process) -> Result:
    """The request comes when the first of two updates has changed the weights: they are rolled back."""
    trainer = process.trainer(globalBatchSize=SAMPLES // 2)
    step(trainer, 0)
    before = state(trainer)
    optimizer_step = trainer.backend.rank.optimizer.step_with_ready_grads
    changed = []

    def step_then_stop() -> bool:
        done = optimizer_step()
        changed.append(not same(before, state(trainer)))
        trainer.request_stop()
        return done

    trainer.backend.rank.optimizer.step_with_ready_grads = step_then_stop
    stopped = False
    try:
        step(trainer, 1)
    except StopRequested:
        stopped = True
    unchanged = same(before, state(trainer))
    trainer.backend.rank.optimizer.step_with_ready_grads = optimizer_step
    step(trainer, 1)
    result = {"stopped": stopped, "changed": changed, "unchanged": unchanged, "pieces": pieces(trainer)}
    trainer.close()
    return result


def _first_token(batch: TrainBatch, sample: int) -> int:
    """Number, among the sampled tokens, of a sample's first one."""
    return int(batch.sampled[: batch.lengths[:sample].sum()].sum())


def non_finite(process: Process) -> Result:
    """Faults in the loss, in a gradient, and in the second update of a step leave everything as it was."""
    result: Result = {}
    trainer = process.trainer()
    step(trainer, 0)
    before = state(trainer)
    batch = make_batch(1)
    batch.advantages[_first_token(batch, 5)] = np.nan
    result["loss"] = trainer.train(batch, SAMPLING, 2)
    result["loss_unchanged"] = same(before, state(trainer))
    name = "decoder.final_layernorm.weight"
    parameter = dict(trainer.backend.rank.ddp.module.named_parameters())[name]
    hook = parameter.register_hook(lambda grad: grad * torch.inf)
    result["gradient"] = trainer.train(make_batch(1), SAMPLING, 2)
    result["gradient_unchanged"] = same(before, state(trainer))
    hook.remove()
    result["good"] = trainer.train(make_batch(1), SAMPLING, 2)
    result["good_unchanged"] = same(before, state(trainer))
    trainer.close()

    trainer = process.trainer(globalBatchSize=SAMPLES // 2)
    before = state(trainer)
    batch = make_batch(1)
    batch.advantages[_first_token(batch, SAMPLES - 1)] = np.inf
    trainer.log_probs(batch, SAMPLING)
    result["second"] = trainer.train(batch, SAMPLING, 1)
    result["second_unchanged"] = same(before, state(trainer))
    trainer.close()
    return result


def reference(process: Process) -> Result:
    """Weights are bit-equal after the reference was swapped in; its values are those of the start."""
    trainer = process.trainer(algorithm={"kl": {"monitor": True}})
    batch = make_batch(0)
    trainer.ref_log_probs(batch, SAMPLING)
    first = torch.cat(trainer.planned.reference_log_probs[0])
    zero_kl = trainer.train(batch, SAMPLING, 1).metrics["train/kl_loss"]
    before = state(trainer)
    trainer.ref_log_probs(batch, SAMPLING)
    later = torch.cat(trainer.planned.reference_log_probs[0])
    unchanged = same(before, state(trainer))
    kl = trainer.train(batch, SAMPLING, 2).metrics["train/kl_loss"]
    trainer.close()
    return {"same": torch.equal(first, later), "unchanged": unchanged, "zero_kl": zero_kl, "kl": kl}


def save_midway(process: Process, folder: str, **training: Any) -> Result:
    """Four steps; saved asleep after two."""
    trainer = process.trainer(**training)
    for seed in range(4):
        if seed == 2:
            asleep = trainer.sleep().transition
            trainer.sleep()
            (process.folder / folder).mkdir(exist_ok=True)
            trainer.save(str(process.folder / folder))
            refused = ""
            try:
                trainer.train(make_batch(2), SAMPLING, 3)
            except RuntimeError as error:
                refused = str(error)
            trainer.wake_up()
        report = step(trainer, seed)
    result = {"state": state(trainer), "metrics": report.metrics, "asleep": asleep, "refused": refused}
    trainer.close()
    return result


def resume(process: Process, folder: str, **training: Any) -> Result:
    """The last two of the four steps, from the saved state."""
    trainer = process.trainer(**training)
    resharded = trainer.load(str(process.folder / folder))
    for seed in (2, 3):
        report = step(trainer, seed)
    result = {"state": state(trainer), "metrics": report.metrics, "resharded": resharded}
    trainer.close()
    return result


KINDS = ("exp_avg", "exp_avg_sq", "master")


def optimizer_pieces(trainer: Trainer) -> dict[str, list[tuple[str, tuple[int, ...], int | None, int, torch.Tensor]]]:
    """This rank's pieces of each of the optimizer's tensors, as shares of HF tensors; NaN where it updates none."""
    rank = trainer.backend.rank
    found: dict[str, Any] = {}
    for kind in KINDS:
        named = {name: torch.full(tensor.shape, torch.nan) for name, tensor in rank.named_parameters().items()}
        for part in rank.state.shards:
            values = getattr(part, kind)
            named[part.name].view(-1)[part.start : part.start + values.numel()] = values
        pieces = local_pieces(named, rank.config, rank.layout)
        found[kind] = [(p.hf_name, p.hf_shape, p.dim, p.start, p.read().clone()) for p in pieces]
    found["step"] = [float(part.step) for part in rank.state.shards]
    return found


def continue_elsewhere(process: Process, folder: str, save: bool = False, **training: Any) -> Result:
    """Two steps that are saved (the run that is not disturbed) or were saved in another layout; then two more."""
    trainer = process.trainer(**training)
    if save:
        for seed in (0, 1):
            step(trainer, seed)
        (process.folder / folder).mkdir(exist_ok=True)
        trainer.save(str(process.folder / folder))
        resharded = ""
    else:
        resharded = trainer.load(str(process.folder / folder))
    result = {"resharded": resharded, "loaded": pieces(trainer), "optimizer": optimizer_pieces(trainer)}
    result["metrics"] = [step(trainer, seed).metrics for seed in (2, 3)]
    result["pieces"] = pieces(trainer)
    trainer.close()
    return result


def refused_load(process: Process) -> Result:
    """A state of another precision and a missing one are refused by name."""
    trainer = process.trainer()
    before, messages = state(trainer), []
    for folder in ("bf16", "nowhere"):
        try:
            trainer.load(str(process.folder / folder))
        except ValueError as error:
            messages.append(str(error))
    trainer.close()
    return {"messages": messages, "unchanged": same(before, state(trainer))}


def rounded_replay(process: Process) -> Result:
    """Mean distance of log-probabilities from those of the same model before its routers' weights moved a little."""
    from megatron.core.transformer.moe.router import TopKRouter

    trainer = process.trainer(**REPLAY)
    whole = PackedBatch(make_batch(0)).micro_batch(np.arange(SAMPLES))
    routers = [m for m in trainer.backend.rank.ddp.module.modules() if isinstance(m, TopKRouter)]
    maps: list[torch.Tensor] = []
    for router in routers:
        router.register_forward_hook(lambda _router, _args, result: maps.append(result[1]))

    def log_probs(experts: torch.Tensor | None) -> torch.Tensor:
        maps.clear()
        (row,) = trainer.backend.forward(
            [replace(whole, experts=experts)], LogProbs(SAMPLING, trainer.passes.vocab_size)
        )
        return row

    before = log_probs(None)
    # [S * b, 4] of each layer -> [S, b, layers, 2].
    chosen = torch.stack([of_layer.int().topk(2, dim=-1).indices for of_layer in maps], dim=1)
    chosen = chosen.to(torch.uint8).unflatten(0, whole.input_ids.T.shape)
    again, calm = list(maps), log_probs(chosen)
    assert torch.equal(calm, before)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for router in routers:
            router.weight += 2e-3 * torch.randn(router.weight.shape, generator=generator)
    result: Result = {"own": float((log_probs(None) - before).abs().mean())}
    result["flipped"] = sum(int((a != b).any(-1).sum()) for a, b in zip(again, maps, strict=True))
    for name, experts in (
        ("replayed", chosen),
        ("one token late", chosen.roll(1, dims=0)),
        ("layers swapped", chosen.flip(2)),
    ):
        result[name] = float((log_probs(experts) - before).abs().mean())
    trainer.close()
    return result


REPLAY: dict[str, Any] = {"model": "moe", "routerReplay": True}
SCHEDULED = {"optimizer": {"schedule": "cosine", "warmupSteps": 2}}
CASES: dict[str, Callable[[Process], Result]] = {
    "one": steps,
    "one_terms": lambda p: steps(p, **MANY_TERMS),
    "one_moe": lambda p: steps(p, model="moe"),
    "one_hybrid": lambda p: steps(p, model="hybrid"),
    "tp_hybrid": lambda p: steps(p, model="hybrid", tensorParallel=2),
    "pp_hybrid": lambda p: steps(p, model="hybrid", pipelineParallel=2),
    "recompute": lambda p: steps(p, recompute="Full"),
    "offload": lambda p: steps(p, optimizer={"hostOffload": True}),
    "offload_moved": offload_moved,
    "bf16": lambda p: steps(p, precision="bf16"),
    "offload_moved_bf16": lambda p: offload_moved(p, precision="bf16"),
    "no_saver": lambda p: steps(p, memorySaver={"mode": "off"}),
    "tp": lambda p: steps(p, tensorParallel=2),
    "pp": lambda p: steps(p, pipelineParallel=2),
    "dp": steps,
    "tp_terms": lambda p: steps(p, tensorParallel=2, **MANY_TERMS),
    "pp_terms": lambda p: steps(p, pipelineParallel=2, **MANY_TERMS),
    "dp_terms": lambda p: steps(p, **MANY_TERMS),
    "ep_moe": lambda p: steps(p, model="moe", expertParallel=2),
    "tp_moe": lambda p: steps(p, model="moe", tensorParallel=2),
    "tp_ep_moe": lambda p: steps(p, model="moe", tensorParallel=2, expertParallel=2),
    "one_replay": lambda p: steps(p, **REPLAY),
    "recompute_replay": lambda p: steps(p, recompute="Full", **REPLAY),
    "selective_replay": lambda p: steps(p, recompute="Selective", **REPLAY),
    "pp_replay": lambda p: steps(p, pipelineParallel=2, recompute="Full", **REPLAY),
    "ep_replay": lambda p: steps(p, expertParallel=2, **REPLAY),
    "tp_replay": lambda p: steps(p, tensorParallel=2, recompute="Selective", **REPLAY),
    "rounded_replay": rounded_replay,
    "kl_replay": lambda p: steps(p, count=1, algorithm={"kl": {"coefficient": 0.1}}, **REPLAY),
    "stop_one": stop_midway,
    "stop_after_update": stop_after_update,
    "stop_tp": lambda p: stop_midway(p, tensorParallel=2),
    "stop_pp": lambda p: stop_midway(p, pipelineParallel=2),
    "stop_dp": stop_midway,
    "non_finite": non_finite,
    "reference": reference,
    "save_fp32": lambda p: save_midway(p, "fp32", **SCHEDULED),
    "save_bf16": lambda p: save_midway(p, "bf16", precision="bf16"),
    "save_dp": lambda p: save_midway(p, "dp", precision="bf16"),
    "resume_fp32": lambda p: resume(p, "fp32", **SCHEDULED),
    "resume_bf16": lambda p: resume(p, "bf16", precision="bf16"),
    "resume_dp": lambda p: resume(p, "dp", precision="bf16"),
    "refused_load": refused_load,
    "undisturbed_dp": lambda p: continue_elsewhere(p, "from_dp", save=True, **SCHEDULED),
    "undisturbed_bf16": lambda p: continue_elsewhere(p, "from_bf16", save=True, precision="bf16"),
    "undisturbed_moe": lambda p: continue_elsewhere(p, "from_moe", save=True, model="moe"),
    "dp_to_tp": lambda p: continue_elsewhere(p, "from_dp", tensorParallel=2, **SCHEDULED),
    "dp_to_pp": lambda p: continue_elsewhere(p, "from_dp", pipelineParallel=2, **SCHEDULED),
    "dp_to_one": lambda p: continue_elsewhere(p, "from_dp", **SCHEDULED),
    "bf16_to_one": lambda p: continue_elsewhere(p, "from_bf16", precision="bf16"),
    "moe_to_ep": lambda p: continue_elsewhere(p, "from_moe", model="moe", expertParallel=2),
}


def main(rank: int, folder: Path, launch: str, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    together = Process(rank, 2, folder, f"{launch}-together")
    alone = Process(0, 1, folder, f"{launch}-alone-{rank}")
    for case in cases:
        print(f"rank {rank}: {case}", flush=True)
        name = case.removeprefix("alone:")
        process = together if name == case else alone
        torch.save(CASES[name](process), folder / f"{name}.rank-{process.rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
