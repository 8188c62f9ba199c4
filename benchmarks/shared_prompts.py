"""A CPU training step in which samples share their prompt against the same step in which each computes its own.

The 29 M model of `train_limit.py`, groups of 8 samples; the two take turns in one process. `long`: 2 prompts of 512
tokens, responses of 30 in the mean and 64 at most; `short`: 8 prompts of 16, responses of 75 and 256.

    python benchmarks/shared_prompts.py [--setting long|short] [--rounds N] [--processor-time]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import numpy as np
from figures import Figure, add_processor_time, report
from train_vs_megatron import PRESETS, timed_trainer

from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import SamplingParams, TrainBatch

MEDIUM = PRESETS["medium"] | {"vocab": 64, "samples": 8, "mbs": 8}
SETTINGS = {
    "long": MEDIUM | {"prompts": 2, "prompt": 512, "response": 64, "mean": 30},
    "short": MEDIUM | {"prompts": 8, "prompt": 16, "response": 256, "mean": 76},
}
OF_TOKENS = {"long": 0.85, "short": 0.0}
"""The ratio's least part of that of tokens."""
LEAST = {"long": 1.0, "short": 1.0}


def make_batch(setting: str) -> TrainBatch:
    """Groups whose samples have the same prompt."""
    size, random = SETTINGS[setting], np.random.default_rng(0)
    count = size["prompts"] * size["samples"]
    lengths = np.minimum(random.geometric(1 / size["mean"], count), size["response"])
    prompts = random.integers(0, size["vocab"], (size["prompts"], size["prompt"])).repeat(size["samples"], axis=0)
    return TrainBatch.of_responses(
        tokens=[np.concatenate([prompt, random.integers(0, size["vocab"], n)]) for prompt, n in zip(prompts, lengths)],
        prompt_lengths=np.full(count, size["prompt"]),
        rollout_log_probs=[np.full(n, -np.log(size["vocab"]), dtype=np.float32) for n in lengths],
        advantages=random.standard_normal(count).astype(np.float32),
    )


def tokens(trainer: Trainer, batch: TrainBatch) -> int:
    """That a step with this batch computes."""
    return sum(row.input_ids.shape[1] for update in trainer.plan(batch).updates for row in update.micro_batches)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="long")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each")
    add_processor_time(parser)
    arguments = parser.parse_args()
    size, batch = SETTINGS[arguments.setting], make_batch(arguments.setting)
    trainer, clock = timed_trainer(size, processor_time=arguments.processor_time)
    backend: Any = trainer.backend
    costs = {"alone": None, "shared": backend.segment_cost}
    seconds: dict[str, list[float]] = {side: [] for side in costs}
    counts: dict[str, int] = {}
    sampling, version = SamplingParams(max_tokens=size["response"]), 0
    for turn in range(arguments.rounds + 1):
        for side, cost in costs.items():
            backend.segment_cost, version = cost, version + 1
            counts[side] = tokens(trainer, batch)
            started = clock()
            trainer.train(batch, sampling, version)
            if turn:  # the first round warms both up
                seconds[side].append(clock() - started)
    median = {side: statistics.median(values) for side, values in seconds.items()}
    print(json.dumps({"setting": arguments.setting, "tokens": counts, "seconds": median}))
    trainer.close()
    ratio, of_tokens = median["alone"] / median["shared"], counts["alone"] / counts["shared"]
    return report(
        [
            Figure(
                f"training step with shared prompts of {size['prompt']} tokens, 8 samples of about {size['mean']}",
                "each sample with its own",
                ratio,
                max(LEAST[arguments.setting], OF_TOKENS[arguments.setting] * of_tokens),
                note=f"{of_tokens:.2f} times fewer tokens",
            )
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
