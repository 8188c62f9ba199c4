"""Step records with values as a small run has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rljob_api import RLJob
from rljob_api.wire.step_record import StepRecord, WeightSync
from rljob_worker.phases import StepTiming
from rljob_worker.records.steps import StepLog
from rljob_worker.records.writer import RecordWriter

MANIFEST: dict[str, Any] = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "sample-run"},
    "spec": {
        "steps": 150,
        "model": {
            "random": {
                "config": {
                    "model_type": "qwen3",
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "head_dim": 32,
                }
            }
        },
        "data": {"synthetic": {"task": "RepeatLast", "rows": 64}},
        "reward": {"name": "match"},
        "rollout": {"promptsPerStep": 2, "samplesPerPrompt": 2, "maxResponseTokens": 8},
        "resources": {"profile": "cpu", "nodes": 1},
    },
}


def job(**spec: Any) -> RLJob:
    return RLJob.model_validate({**MANIFEST, "spec": {**MANIFEST["spec"], **spec}})


def bare(step: int, attempt: int = 1, **more: Any) -> StepRecord:
    """A record that says nothing but its step, before it stands in a log."""
    content = {"step_seconds": 1.0, "time": 0.0, "phases": {}, "other": 1.0, "metrics": {}, "weights": {}, "memory": {}}
    return StepRecord.parse_draft({"step": step, "attempt": attempt, **content, **more})


def run_folder(path: Path, **spec: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    content = {"job": job(**spec).model_dump(mode="json", by_alias=True), "attempt": 1, "pid": 1}
    (path / "run.json").write_text(json.dumps(content))
    return path


def timing(random: np.random.Generator, step: int) -> StepTiming:
    """Phases of a step of about a quarter of a second; checkpoints every 50 and evaluations every 25 steps."""
    usual = {
        "rollout": 0.11,
        "reward": 0.002,
        "rollout_sleep": 0.003,
        "wake_up": 0.006,
        "actor_train": 0.09,
        "rollout_wake_weights": 0.001,
        "update_weights": 0.018,
        "sleep": 0.005,
        "rollout_wake_kv": 0.001,
    }
    if step % 50 == 0:
        usual["checkpoint"] = 0.05
    if step % 25 == 0:
        usual["eval"] = 0.15
    phases = {name: seconds * float(random.lognormal(0, 0.1)) for name, seconds in usual.items()}
    if step == 1:
        phases["rollout"] *= 9
    return StepTiming(sum(phases.values()) + 0.004 * float(random.lognormal(0, 0.3)), phases)


def write_step(
    writer: RecordWriter, random: np.random.Generator, step: int, scale: float = 40.0, **metrics: float
) -> StepRecord:
    """One step of a run whose reward rises over about three times `scale` steps; `metrics` replace its own."""
    reward = 0.08 + 0.9 * (1 - np.exp(-step / scale)) + 0.02 * random.normal()
    writer.metrics(
        {
            "rollout/raw_reward": reward,
            "rollout/raw_reward_std": 0.3 * np.exp(-step / scale) + 0.03,
            "rollout/response_len/mean": 8.0,
            "rollout/truncated_ratio": 1.0,
            "rollout/response_tokens": 2048.0,
            "train/loss": float(random.normal() * 1e-3),
            "train/grad_norm": float(random.lognormal()),
            "train/entropy_loss": 2.5,
            "train/train_rollout_logprob_abs_diff": 0.0 if step % 17 == 0 else 3e-6 * float(random.lognormal(0, 0.5)),
            "train/train_rollout_logprob_abs_diff_max": 4e-5 * float(random.lognormal(0, 0.5)),
            **metrics,
        }
    )
    if step % 25 == 0:
        writer.metrics({"eval/synthetic": reward - 0.03, "eval/synthetic/pass@1": 0.5})
    ledger = {"rank": 0, "phase": "sleep", "free": 9_000, "used": 1_000, "paused": 700, "backup": 500}
    writer.memory("wake_up", {"trainer-0": {**ledger, "paused": 0, "process_resident": 4_000, "arena_resident": None}})
    writer.memory("sleep", {"trainer-0": {**ledger, "moved_bytes": 700, "backup_bytes": 500, "arena_resident": 0}})
    writer.memory("rollout_wake_kv", {"engine-0": {"resumed_bytes": 0, "resident_bytes": 6_000 + step}})
    writer.busy({"trainer-0": 0.09, "engine-0": 0.11})
    writer.overlapped({"reward": 0.01})
    writer.weights(WeightSync(version=step, bytes=1_200_000, tensors=25, mode="load"))
    return writer.write(step, timing(random, step), applied=True)


def write_run(path: Path, steps: int, scale: float = 40.0, **metrics: float) -> list[StepRecord]:
    """A run folder with records of `steps` steps; returns them."""
    run_folder(path, steps=steps)
    log = StepLog(path)
    writer = RecordWriter(path, log, 1, [])
    random = np.random.default_rng(0)
    records = [write_step(writer, random, step, scale, **metrics) for step in range(1, steps + 1)]
    log.close()
    return records


def write_samples(path: Path, step: int, texts: list[str], rewards: list[float | None]) -> None:
    from rljob_api.spec import RecordsSpec
    from rljob_worker.records.trajectories import write_trajectories

    samples = [
        {
            "ordinal": i // 2,
            "prompt_uid": f"synthetic/{i // 2}",
            "prompt": "a b c",
            "label": "c c",
            "sample": i % 2,
            "response": text,
            "response_tokens": 2,
            "finish_reason": "stop",
            "reward": reward,
            "reward_parts": {"match": reward},
            "reward_error": None,
            "advantage": 0.5,
            "weight_version": step - 1,
        }
        for i, (text, reward) in enumerate(zip(texts, rewards, strict=True))
    ]
    write_trajectories(path, RecordsSpec(), step, [samples[i : i + 2] for i in range(0, len(samples), 2)])


def write_sample_tokens(
    path: Path, step: int, number: int, response: str, texts: list[str], trained: bool = True
) -> None:
    """The tokens of sample `number` of `write_samples`: the engine's log-probabilities are -1, -2, ..., the trainer's
    lower by 0, 0.25, 0.5, ..."""
    from rljob_worker.host.files import WriteFailures
    from rljob_worker.records.token_files import SampleTokens, digest, write_tokens

    count = range(len(texts))
    differences = [-place / 4 for place in count] if trained else None
    engine = [-1.0 - place for place in count]
    tokens = SampleTokens(number // 2, number % 2, digest(response), texts, engine, differences)
    write_tokens(path, step, [tokens], WriteFailures())
