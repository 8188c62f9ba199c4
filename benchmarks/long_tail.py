"""Seconds per step of partial rollout and tail batching against synchronous steps, at equal trained samples.

All sides are real jobs (`rljob run`: Ray, Megatron, vLLM) of one model, prompts, reward, seed and threads; one has
`rollout.partial`, one `rollout.tail`, two neither. The model is built so that lengths are what the setting says:
attention and MLP do all their work and add next to nothing, and each word is of a class, followed by words of its class
alone, or by the end with the probability that makes the class's mean length. Means are quantiles of a log-normal
distribution; a prompt is of one class, so that a group is long as a whole, as a hard question's is.

The bound: with all places busy all the time, and nothing computed twice, the same tokens would take `tokens / places`
steps of the engine with `places` sequences. What one takes is measured in a job of its own, whose responses are all of
one length. Partial rollout does compute something twice: under new weights an engine reads again what a response has
so far. Tail batching samples what it defers twice, and its long steps are as long as the synchronous ones: it has no
goal of its own, and its ratio is printed beside the others'.

    python benchmarks/long_tail.py [--setting mild|heavy|both] [--steps N] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from figures import Figure, report
from peer_trl import Size, call
from peer_trl_worker import __file__ as WORKER_FILE
from safetensors.torch import load_file, save_file

from rljob_api.spec import RandomModel, RLJobSpec
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.models.random_model import make_random_model
from rljob_worker.records.steps import read_steps
from rljob_worker.records.trajectories import read_trajectories

WORKER = Path(WORKER_FILE).resolve()
PROMPTS, SAMPLES, PROMPT_TOKENS = 8, 4, 16
CLASSES, WORDS = 32, 4
"""Classes of lengths, and words of each."""
SPECIAL_TOKENS = 3
NEXT_TO_NOTHING = 1e-4
NEVER = -25.0
"""Logit of a word of another class."""
SIZE = Size(hidden=128, ffn=384, layers=4, heads=4, head_dim=32)
"""Small: with more parameters a CPU spends most of a step in training, and a job on devices in generation."""
REACHES = 0.85
FULL_TOKENS, FULL_STEPS, FULL_SKIPPED = 128, 8, 3
"""Response tokens, steps and skipped steps of the job that has all places busy all the time."""
DEFERRED = 0.2
"""`rollout.tail.deferLongest`: every fifth step is a long one."""


@dataclass(frozen=True)
class Setting:
    """One distribution of lengths, and the partial rollout that meets it."""

    name: str
    sigma: float
    """Standard deviation of the logarithm of the classes' means."""
    longest: int
    skew: float
    """Longest response to mean response."""
    partial: float
    """`rollout.partial.factor`"""
    places: int
    """`rollout.maxNumSeqs`: where a response has ended, the next one begins. The synchronous job has one for each."""
    staleness: int
    goal: float
    """Least ratio of the synchronous job's seconds to those of partial rollout."""

    def mean_lengths(self) -> list[float]:
        """Mean length of each class, so that responses cut at `longest` have their mean at `longest / skew`."""
        wanted = self.longest / self.skew
        shape = [math.exp(self.sigma * NormalDist().inv_cdf((i + 0.5) / CLASSES)) for i in range(CLASSES)]
        low, high = 1e-3, 1e6
        for _ in range(100):
            scale = math.sqrt(low * high)
            found = float(np.mean([self._cut_mean(max(1.0, scale * one)) for one in shape]))
            low, high = (scale, high) if found < wanted else (low, scale)
        return [max(1.0, scale * one) for one in shape]

    def _cut_mean(self, mean: float) -> float:
        end = 1.0 / mean
        return (1.0 - (1.0 - end) ** self.longest) / end


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("mild", 0.7, 512, 4.3, partial=3.0, places=64, staleness=8, goal=1.25),
        Setting("heavy", 2.4, 1024, 17.0, partial=8.0, places=64, staleness=15, goal=2.0),
    )
}


# --- the job -----------------------------------------------------------------------------------


def words_of(kind: int) -> list[str]:
    """The words of a class."""
    return [f"w{kind * WORDS + i}" for i in range(WORDS)]


def write_prompts(file: Path, rows: int) -> None:
    """Prompts of one class each; each run through the classes is in an order of its own."""
    random = np.random.default_rng(0)
    kinds = np.concatenate([random.permutation(CLASSES) for _ in range(-(-rows // CLASSES))])[:rows]
    prompts = [[words_of(kind)[i] for i in random.integers(0, WORDS, PROMPT_TOKENS)] for kind in kinds]
    file.write_text("".join(json.dumps({"prompt": " ".join(row), "label": row[-1]}) + "\n" for row in prompts))


def shape_lengths(folder: Path, setting: Setting, hidden: int) -> None:
    """Change a model so that its responses are as long as the setting says."""
    tokenizer = load_tokenizer(folder)
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(NEXT_TO_NOTHING)
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embedding.zero_()
    head.zero_()
    logits = torch.full((head.shape[0], CLASSES), NEVER)
    for kind, mean in enumerate(setting.mean_lengths()):
        ids = tokenizer.convert_tokens_to_ids(words_of(kind))
        embedding[ids, kind] = 1.0
        logits[ids, kind] = math.log(max(1.0 - 1.0 / mean, 1e-9) / WORDS)
        logits[tokenizer.eos_token_id, kind] = -math.log(mean)
    # What the last norm makes of a word is its class's direction, of length sqrt(hidden).
    head[:, :CLASSES] = logits / math.sqrt(hidden)
    for file in folder.glob("*.safetensors"):
        save_file({name: tensors[name].contiguous() for name in load_file(file)}, file, metadata={"format": "pt"})


def make_job(folder: Path, setting: Setting, size: Size, arguments: argparse.Namespace) -> dict[str, Any]:
    """Write prompts, tokenizer and model; returns the manifest of the synchronous job."""
    steps = arguments.skip + arguments.steps
    data, model = folder / "prompts.jsonl", folder / "model"
    write_prompts(data, round(PROMPTS * (steps + max(setting.partial, 4))))
    vocabulary = CLASSES * WORDS + SPECIAL_TOKENS
    config = size.config(vocabulary) | {"max_position_embeddings": 2048}
    random_model = {"config": config, "tokenizer": {"vocabSize": vocabulary}}
    longest_sample = PROMPT_TOKENS + setting.longest
    spec: dict[str, Any] = {
        "steps": steps,
        "model": {"random": random_model},
        "data": {"path": str(data), "shuffle": False},
        "reward": {"python": f"{WORKER.stem}:reward"},
        "rollout": {
            "promptsPerStep": PROMPTS,
            "samplesPerPrompt": SAMPLES,
            "maxResponseTokens": setting.longest,
            "assignment": "Fixed",
        },
        "training": {
            "precision": "fp32",
            "maxTokensPerMicroBatch": max(4096, longest_sample),
            "optimizer": {"lr": 1e-7},
        },
        "resources": {"profile": "cpu", "nodes": 1, "devicesPerNode": 1, "threadsPerDevice": arguments.threads},
        "checkpoint": {"everySteps": steps},
    }
    tokenizer = prepare_tokenizer(RLJobSpec.model_validate(spec), folder / "tokenizer")
    make_random_model(RandomModel.model_validate(random_model), tokenizer, model)
    shape_lengths(model, setting, size.hidden)
    spec["model"] = {"path": str(model)}
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "long-tail"}, "spec": spec}


def with_rollout(manifest: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The same job with other fields of `rollout`."""
    return manifest | {"spec": manifest["spec"] | {"rollout": manifest["spec"]["rollout"] | fields}}


def sides_of(manifest: dict[str, Any], setting: Setting) -> dict[str, dict[str, Any]]:
    """The jobs in their order: the synchronous one comes first and last.

    A machine that grows faster or slower meanwhile must not favour a side.
    """
    partial = {
        "partial": {"factor": setting.partial},
        "staleness": {"max": setting.staleness},
        "maxNumSeqs": setting.places,
    }
    full = with_rollout(
        manifest, promptsPerStep=setting.places // SAMPLES, maxResponseTokens=FULL_TOKENS, ignoreEos=True
    )
    return {
        "before": manifest,
        "full": full | {"spec": full["spec"] | {"steps": FULL_STEPS}},
        "partial": with_rollout(manifest, **partial),
        "tail": with_rollout(manifest, tail={"deferLongest": DEFERRED}),
        "after": manifest,
    }


# --- running it --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """The counted steps of one job; a value for each."""

    seconds: np.ndarray
    """Without the checkpoint after the last step."""
    rollout: np.ndarray
    lengths: list[list[int]]
    """Lengths of the samples that were trained on."""
    carried: float
    """Tokens of responses that a step leaves to the next, in the mean."""

    @property
    def tokens(self) -> float:
        """Trained in a step, in the mean."""
        return float(np.mean([sum(lengths) for lengths in self.lengths]))

    def text(self, name: str) -> str:
        """A line about it."""
        return (
            f"  {name:>12}: {self.seconds.mean():6.2f} s a step, of it rollout {self.rollout.mean():.2f} s; "
            f"{self.tokens:.0f} response tokens trained a step"
        )


def run_job(folder: Path, name: str, manifest: dict[str, Any], skip: int) -> Measured:
    """Run a job; what its steps after the first ones took."""
    file, output = folder / f"{name}.json", folder / name
    file.write_text(json.dumps(manifest))
    paths = [str(WORKER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "rljob_worker.cli.main", "run", str(file), "--output", str(output)]
    call(command, folder / f"{name}.log", os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    records = read_steps(output)[skip:]
    return Measured(
        np.array([record.step_seconds - record.phases.get("checkpoint", 0.0) for record in records]),
        np.array([record.phases["rollout"] for record in records]),
        [
            [s["response_tokens"] for s in read_trajectories(output, record.step)[1] if s["decision"] == "trained"]
            for record in records
        ],
        float(np.mean([record.metrics.get("rollout/carried_tokens", 0.0) for record in records])),
    )


def measure(setting: Setting, size: Size, arguments: argparse.Namespace) -> list[Figure]:
    """Run both sides of one setting, the synchronous one before and after."""
    with tempfile.TemporaryDirectory(prefix="long-tail-") as name:
        folder = Path(name)
        manifest = make_job(folder, setting, size, arguments)
        sides: dict[str, Measured] = {}
        for side, job in sides_of(manifest, setting).items():
            print(f"{setting.name}: running {side} ...", flush=True)
            sides[side] = run_job(folder, side, job, FULL_SKIPPED if side == "full" else arguments.skip)
            print(sides[side].text(side), flush=True)
    if sides["before"].lengths != sides["after"].lengths:
        raise SystemExit("two synchronous runs of one job gave responses of different lengths")
    whole = [sides["before"], sides["after"]]
    lengths = [length for of_step in whole[0].lengths for length in of_step]
    skew = max(lengths) / float(np.mean(lengths))
    engine_step = float(sides["full"].rollout.mean()) / FULL_TOKENS
    print(f"  an engine step of {setting.places} sequences takes {1000 * engine_step:.2f} ms")
    seconds = float(np.mean([side.seconds.mean() for side in whole]))
    beside = seconds - float(np.mean([side.rollout.mean() for side in whole]))
    bound = beside + whole[0].tokens / setting.places * engine_step
    ratio = seconds / float(sides["partial"].seconds.mean())
    more = sides["partial"].tokens / whole[0].tokens - 1
    print(f"  longest to mean response {skew:.1f}; partial rollout trained on {more:+.1%} tokens; bound {bound:.2f} s")
    print(f"  {sides['partial'].carried:.0f} tokens are read again in each of its steps")
    more = sides["tail"].tokens / whole[0].tokens - 1
    faster = seconds / float(sides["tail"].seconds.mean())
    print(f"  tail batching: {faster:.2f} times as fast as synchronous steps, trained on {more:+.1%} tokens")
    what = f"Steps of partial rollout, longest to mean response {skew:.1f}"
    return [
        Figure(f"{what}, speed", "synchronous steps", ratio, setting.goal),
        Figure(f"{what}, share of the bound", "all places always busy", ratio * bound / seconds, REACHES),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=(*SETTINGS, "both"), default="both")
    parser.add_argument(
        "--steps",
        type=int,
        default=15,
        help="counted steps of each side (default 15: three long ones of tail batching)",
    )
    parser.add_argument("--skip", type=int, default=10, help="steps before them (default 10)")
    parser.add_argument("--threads", type=int, default=2, help="threads and cores of each side (default 2)")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.skip < 1:
        parser.error("--steps and --skip must be at least 1")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    names = SETTINGS if arguments.setting == "both" else (arguments.setting,)
    return report([figure for name in names for figure in measure(SETTINGS[name], SIZE, arguments)])


if __name__ == "__main__":
    sys.exit(main())
