"""Seconds per step against TRL 1.16's GRPOTrainer: same machine, model, prompts, reward, precision (fp32) and threads.

RLJob's side is a real job (`rljob run`: Ray, Megatron, vLLM); TRL's side runs `peer_trl_worker.py` in an environment of
its own, made from requirements/peer-trl.txt on first use. TRL has no vLLM here: it generates with transformers. RLJob
runs first, and each TRL response is made to end where RLJob's ended, so both generate and train the same tokens: with
`skewed` the end token came by chance (vocabulary 64, mean length about 65), with `equal` every response has all tokens.
`partial` is `skewed` with RLJob's `rollout.partial`: each of its steps trains on as many samples, and TRL on the same.
Both use micro-batches of the same padded size and one optimizer update a step. The first step is a warm-up.
At last both compute a step of two updates (the second one off-policy, so the clip matters) on one fixed batch.

    python benchmarks/peer_trl.py [--setting skewed|partial|equal|all] [--steps N] [--peer-python PATH] [--tiny]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from figures import Figure, report
from peer_trl_worker import __file__ as WORKER_FILE

from rljob_api.spec import RandomModel, RLJobSpec
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.models.random_model import make_random_model
from rljob_worker.records.steps import read_steps
from rljob_worker.records.trajectories import read_trajectories
from rljob_worker.types import SamplingParams, TrainBatch

WORKER = Path(WORKER_FILE).resolve()
LOCK = WORKER.parent.parent / "requirements" / "peer-trl.txt"
PROMPTS, SAMPLES, PROMPT_TOKENS, SPECIAL_TOKENS = 8, 8, 16, 3
AGREEMENT = 1e-4
OPEN_STEPS = 2
"""Partial rollout has prompts open for so many steps more."""
UPDATE_SAMPLES = 8
SIDE_SECONDS = 3600.0
OPTIMIZER = {"lr": 1e-6, "beta2": 0.98, "eps": 1e-8, "clip_grad": 1.0}


@dataclass(frozen=True)
class Setting:
    """One job."""

    name: str
    vocabulary: int
    ignore_end: bool
    goal: float
    """Least ratio of TRL's seconds to RLJob's."""
    rollout: Mapping[str, Any] = field(default_factory=dict)
    """More fields of RLJob's `spec.rollout`."""
    steps: int = 2
    """Counted ones of each side."""


PARTIAL = {"partial": {"factor": 2}, "staleness": {"max": 2}}
SETTINGS = {
    s.name: s
    for s in (
        Setting("skewed", 64, False, 2.5),
        # The first steps of partial rollout are short of long responses, which are still growing.
        Setting("partial", 64, False, 3.2, PARTIAL, steps=6),
        Setting("equal", 4096, True, 1.15),
    )
}


@dataclass(frozen=True)
class Size:
    """The model and the longest response."""

    hidden: int = 512
    ffn: int = 1536
    layers: int = 8
    heads: int = 8
    head_dim: int = 64
    max_tokens: int = 256

    def config(self, vocabulary: int) -> dict[str, Any]:
        """Hugging Face config; 29 M parameters with the defaults and a vocabulary of 4096."""
        return {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "head_dim": self.head_dim,
            "tie_word_embeddings": False,
            "max_position_embeddings": 1024,
        }


TINY = Size(hidden=64, ffn=128, layers=2, heads=4, head_dim=32, max_tokens=16)


# --- the shared job ----------------------------------------------------------------------------


def write_prompts(file: Path, vocabulary: int, steps: int) -> None:
    """Prompts of 16 words that together use the whole vocabulary; the label is the last word."""
    words = [f"w{i}" for i in range(vocabulary - SPECIAL_TOKENS)]
    random = np.random.default_rng(0)
    rows = max(PROMPTS * steps, -(-len(words) // PROMPT_TOKENS))
    order = np.resize(random.permutation(len(words)), rows * PROMPT_TOKENS).reshape(rows, PROMPT_TOKENS)
    prompts = [[words[i] for i in row] for row in order]
    file.write_text("".join(json.dumps({"prompt": " ".join(row), "label": row[-1]}) + "\n" for row in prompts))


def make_job(folder: Path, setting: Setting, size: Size, arguments: argparse.Namespace) -> dict[str, Any]:
    """Write prompts, tokenizer and model; returns the manifest."""
    data, model = folder / "prompts.jsonl", folder / "model"
    write_prompts(data, setting.vocabulary, setting.steps + 1 + OPEN_STEPS)
    random_model = {"config": size.config(setting.vocabulary), "tokenizer": {"vocabSize": setting.vocabulary}}
    spec: dict[str, Any] = {
        "steps": setting.steps + 1,
        "model": {"random": random_model},
        "data": {"path": str(data), "shuffle": False},
        "reward": {"python": f"{WORKER.stem}:reward"},
        "rollout": {
            "promptsPerStep": PROMPTS,
            "samplesPerPrompt": SAMPLES,
            "maxResponseTokens": size.max_tokens,
            "ignoreEos": setting.ignore_end,
            **setting.rollout,
        },
        "training": {
            "precision": "fp32",
            "maxTokensPerMicroBatch": arguments.micro_batch * (PROMPT_TOKENS + size.max_tokens),
            "optimizer": {
                "lr": OPTIMIZER["lr"],
                "beta2": OPTIMIZER["beta2"],
                "eps": OPTIMIZER["eps"],
                "clipGrad": OPTIMIZER["clip_grad"],
            },
        },
        "resources": {"profile": "cpu", "nodes": 1, "devicesPerNode": 1, "threadsPerDevice": arguments.threads},
        "checkpoint": {"everySteps": setting.steps + 1},
    }
    tokenizer = prepare_tokenizer(RLJobSpec.model_validate(spec), folder / "tokenizer")
    make_random_model(RandomModel.model_validate(random_model), tokenizer, model)
    spec["model"] = {"path": str(model)}
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "peer-trl"}, "spec": spec}


# --- running both sides ------------------------------------------------------------------------


def call(command: list[str], log: Path, environment: dict[str, str]) -> None:
    """Run a command to its end, its output into a file that is shown when it fails."""
    with log.open("wb") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=SIDE_SECONDS, check=False
        )
    if done.returncode:
        tail = log.read_text(errors="replace")[-8000:]
        raise SystemExit(f"{' '.join(command)}\nended with exit code {done.returncode}; its last output:\n{tail}")


def run_rljob(folder: Path, name: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """Run the job in the folder's run `name`; seconds, phases, tokens and response lengths of each step.

    The checkpoint after the last step is not counted: TRL saves none.
    """
    file, run = folder / "job.yaml", folder / name
    file.write_text(yaml.safe_dump(manifest, sort_keys=False))
    paths = [str(WORKER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "rljob_worker.cli.main", "run", str(file), "--output", str(run)]
    call(command, folder / f"rljob-{name}.log", os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    records = read_steps(run)
    rows = [read_trajectories(run, record.step)[1] for record in records]
    steps = [[row["response_tokens"] for row in of_step if row["decision"] == "trained"] for of_step in rows]
    return {
        "seconds": [r.step_seconds - r.phases.get("checkpoint", 0.0) for r in records],
        "generation": [r.phases["rollout"] for r in records],
        "tokens": [sum(lengths) for lengths in steps],
        "lengths": steps,
    }


def peer_environment(given: Path | None) -> Path:
    """The interpreter of TRL's environment, which is made when it is not there."""
    if given is not None:
        return given
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "rljob" / f"peer-trl-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:16]}"
    python, done = folder / "bin" / "python", folder / "installed"
    if done.exists():
        return python
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise SystemExit("uv was found neither beside this interpreter nor in PATH: `make install` puts it into .venv")
    print(f"Installing TRL into {folder} (about 5 GB, once) ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--compile-bytecode"]
    subprocess.run([*install, "--python", str(python), "-r", str(LOCK)], check=True)
    done.touch()
    return python


def run_trl(python: Path, folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Give the worker a request; returns its result."""
    name = request["task"]
    files = [folder / f"{name}-{part}.json" for part in ("request", "result")]
    files[0].write_text(json.dumps(request | {"output": str(folder / "trl")}))
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    own |= {"OMP_NUM_THREADS": str(request["threads"]), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    call([str(python), str(WORKER), *map(str, files)], folder / f"trl-{name}.log", own)
    return dict(json.loads(files[1].read_text()))


# --- one fixed batch ---------------------------------------------------------------------------


def fixed_samples(vocabulary: int) -> list[dict[str, Any]]:
    """Eight responses of unequal lengths, twice: the second update sees what the first has learnt, and clips."""
    random = np.random.default_rng(1)
    samples = [
        {
            "prompt": random.integers(SPECIAL_TOKENS, vocabulary, random.integers(4, PROMPT_TOKENS + 1)).tolist(),
            "response": random.integers(SPECIAL_TOKENS, vocabulary, random.integers(1, 65)).tolist(),
            # With a mean other than 0, so that the loss is not a small difference of large numbers.
            "advantage": float(np.float32(0.5 + random.standard_normal())),
        }
        for _ in range(UPDATE_SAMPLES)
    ]
    return samples * 2


def train_fixed_batch(request: dict[str, Any]) -> dict[str, float]:
    """RLJob's trainer on the fixed batch; to be called in a process of its own."""
    os.environ["OMP_NUM_THREADS"] = str(request["threads"])
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from rljob_worker.trainer.trainer import Trainer

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    samples, size = request["batch"], request["update_samples"]
    spec: dict[str, Any] = {
        "steps": 1,
        "model": {"path": request["model"]},
        "data": {"path": request["data"]},
        "reward": {"name": "match"},
        "rollout": {"promptsPerStep": len(samples), "samplesPerPrompt": 1, "maxResponseTokens": request["max_tokens"]},
        "algorithm": {
            "clipLow": request["clip_low"],
            "clipHigh": request["clip_high"],
            "aggregation": "TokenMean",
            "tis": {"enabled": False},
        },
        "training": {
            "precision": "fp32",
            "globalBatchSize": size,
            "maxTokensPerMicroBatch": 256,
            "optimizer": {
                "lr": request["lr"],
                "beta2": request["beta2"],
                "eps": request["eps"],
                "clipGrad": request["clip_grad"],
            },
        },
        "resources": {"profile": "cpu", "devicesPerNode": 1},
    }
    folder = request["model"]
    trainer = Trainer(
        spec, rank=0, world_size=1, store=store, secret="of-a-benchmark", model_folder=folder, total_updates=2
    )
    trainer.setup()
    batch = TrainBatch.of_responses(
        tokens=[np.array(s["prompt"] + s["response"]) for s in samples],
        prompt_lengths=np.array([len(s["prompt"]) for s in samples]),
        rollout_log_probs=[np.zeros(len(s["response"]), dtype=np.float32) for s in samples],
        advantages=np.array([s["advantage"] for s in samples], dtype=np.float32),
    )
    sampling = SamplingParams(max_tokens=request["max_tokens"])
    trainer.log_probs(batch, sampling)
    metrics = trainer.train(batch, sampling, 1).metrics
    trainer.close()
    names = {"loss": "loss", "grad_norm": "grad_norm", "entropy": "entropy_loss", "clip_fraction": "pg_clipfrac"}
    return {name: metrics[f"train/{key}"] for name, key in names.items()}


def compare_fixed_batch(python: Path, folder: Path, request: dict[str, Any], vocabulary: int) -> float:
    """Print both sides' values; the largest relative difference of losses, gradient norms and entropies."""
    request = request | {
        "task": "fixed_batch",
        "batch": fixed_samples(vocabulary),
        "update_samples": UPDATE_SAMPLES,
        "samples_per_prompt": UPDATE_SAMPLES,
        "lr": 1e-4,
        "eps": 1e-6,
        "micro_batch": 8,
    }
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        ours = pool.submit(train_fixed_batch, request).result(timeout=SIDE_SECONDS)
    theirs = run_trl(python, folder, request)
    tokens = sum(len(sample["response"]) for sample in request["batch"])
    print(f"  one fixed batch ({len(request['batch'])} samples, {tokens} response tokens, 2 updates):")
    differences = []
    for name in ("loss", "grad_norm", "entropy"):
        difference = abs(ours[name] - theirs[name]) / abs(theirs[name])
        differences.append(difference)
        print(f"    {name:<10} rljob {ours[name]:.7f}  trl {theirs[name]:.7f}  relative difference {difference:.1e}")
    print(f"    clipped tokens: rljob {ours['clip_fraction']:.2%}, trl {theirs['clip_fraction']:.2%}")
    return max(differences)


# --- the benchmark -----------------------------------------------------------------------------


def measure(setting: Setting, size: Size, python: Path, arguments: argparse.Namespace) -> list[Figure]:
    """Run one setting; its speed, and whether both sides trained the same tokens to the same values."""
    with tempfile.TemporaryDirectory(prefix="peer-trl-") as name:
        folder = Path(name)
        manifest = make_job(folder, setting, size, arguments)
        print(f"{setting.name}: running rljob ...", flush=True)
        ours = run_rljob(folder, "before", manifest)
        request = {
            "task": "train",
            "model": manifest["spec"]["model"]["path"],
            "data": manifest["spec"]["data"]["path"],
            "end_token": load_tokenizer(folder / "model").eos_token_id,
            "lengths": ours["lengths"],
            "steps": setting.steps + 1,
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "max_tokens": size.max_tokens,
            "micro_batch": arguments.micro_batch,
            "threads": arguments.threads,
            "seed": 1234,
            "clip_low": 0.2,
            "clip_high": 0.28,
            **OPTIMIZER,
        }
        print(f"{setting.name}: running TRL ...", flush=True)
        theirs = run_trl(python, folder, request)
        # Around the peer: a machine that grows faster or slower meanwhile must not favour a side.
        print(f"{setting.name}: running rljob again ...", flush=True)
        again = run_rljob(folder, "after", manifest)
        if again["lengths"] != ours["lengths"]:
            raise SystemExit("rljob: two runs of one job gave responses of different lengths")
        ours = {key: [*values, *again[key][1:]] for key, values in ours.items()}
        ratio, more_tokens = compare_seconds(setting, ours, theirs, arguments)
        difference = compare_fixed_batch(python, folder, request, setting.vocabulary)
    what = f"GRPO step, hidden {size.hidden}, {PROMPTS} x {SAMPLES} samples, {setting.name} lengths"
    peer = f"TRL {theirs['trl']} `GRPOTrainer`"
    return [
        Figure(f"{what}, speed", peer, ratio, 0.0 if arguments.tiny else setting.goal),
        Figure(f"{what}, tokens more or less", peer, more_tokens, 0.0, at_most=True),
        Figure(f"{what}, one fixed batch: difference / {AGREEMENT:g}", peer, difference / AGREEMENT, 1.0, at_most=True),
    ]


def compare_seconds(
    setting: Setting, ours: dict[str, Any], theirs: dict[str, Any], arguments: argparse.Namespace
) -> tuple[float, float]:
    """Print one setting's table; the ratio, and the share of tokens that one side had more."""
    means: dict[str, dict[str, float]] = {}
    for side, result in (("rljob", ours), ("trl", theirs)):
        expected = setting.steps * (2 if side == "rljob" else 1) + 1
        if len(result["seconds"]) != expected:
            raise SystemExit(f"{side}: {len(result['seconds'])} steps were recorded, not {expected}")
        mean = {key: float(np.mean(result[key][1:])) for key in ("seconds", "generation", "tokens")}
        means[side] = mean | {"per_1000": 1000 * mean["seconds"] / mean["tokens"]}
        each = ", ".join(f"{value:.2f}" for value in result["seconds"][1:])
        print(
            f"  {side:>5}: {mean['seconds']:7.2f} s a step ({each}), of it generation {mean['generation']:.2f} s; "
            f"{mean['tokens']:.0f} response tokens generated and trained a step; "
            f"{means[side]['per_1000']:.3f} s for 1000 of them"
        )
    difference = means["trl"]["tokens"] / means["rljob"]["tokens"] - 1
    mean_length = means["rljob"]["tokens"] / (PROMPTS * SAMPLES)
    print(f"  mean response {mean_length:.1f} tokens; TRL trained on {difference:+.2%} tokens")
    ratio = means["trl"]["seconds"] / means["rljob"]["seconds"]
    line = {"benchmark": "peer_trl", "setting": setting.name, "trl_version": theirs["trl"], "steps": setting.steps}
    print(json.dumps(line | means | {"ratio": round(ratio, 3), "target": setting.goal}))
    return ratio, abs(difference)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=(*SETTINGS, "all"), default="all")
    parser.add_argument("--steps", type=int, help="counted steps of each side (default 2, with partial 6)")
    parser.add_argument("--threads", type=int, default=2, help="threads and cores of each side (default 2)")
    parser.add_argument("--micro-batch", type=int, default=8, help="longest samples in a micro-batch (default 8)")
    parser.add_argument("--peer-python", type=Path, help="interpreter of an environment that has TRL 1.16")
    parser.add_argument("--tiny", action="store_true", help="a small model and 16 tokens: a smoke test")
    arguments = parser.parse_args()
    if (arguments.steps is not None and arguments.steps < 1) or PROMPTS * SAMPLES % arguments.micro_batch:
        parser.error(f"--steps must be at least 1, and --micro-batch must divide {PROMPTS * SAMPLES}")
    # Ray's helper processes would otherwise have cores of their own, which TRL's single process has not.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    python = peer_environment(arguments.peer_python)
    names = SETTINGS if arguments.setting == "all" else (arguments.setting,)
    size = TINY if arguments.tiny else Size()
    chosen = [replace(SETTINGS[name], steps=arguments.steps or SETTINGS[name].steps) for name in names]
    return report([figure for setting in chosen for figure in measure(setting, size, python, arguments)])


if __name__ == "__main__":
    sys.exit(main())
