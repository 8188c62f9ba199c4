"""A CPU training step against the time of its products alone, and against the same step in padded rectangles.

The limit is all matrix products of the layers, forward and backward, over the samples' own tokens, in as few rows as
the bound allows, with weights of their own for each layer. The three take turns in one process. `skewed`: 64 samples,
responses of 75 tokens in the mean and 256 at most; `medium`: 16 samples of 16 + 112, all of one length.

    python benchmarks/train_limit.py [--setting skewed|medium] [--rounds N] [--processor-time]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import numpy as np
import torch
from figures import Figure, add_processor_time, report
from padded_plan import PaddedSide
from train_vs_megatron import PRESETS, timed_trainer

from rljob_worker.types import SamplingParams, TrainBatch

MEAN_RESPONSE = 76
SETTINGS = {
    "skewed": PRESETS["medium"] | {"vocab": 64, "prompts": 8, "samples": 8, "response": 256, "mbs": 8},
    "medium": PRESETS["medium"],
}
SHARES = {"skewed": 0.73, "medium": 0.76}
AGAINST_PADDED = {"skewed": 1.1, "medium": 0.98}


def make_batch(setting: str) -> TrainBatch:
    size = SETTINGS[setting]
    random, count = np.random.default_rng(0), size["prompts"] * size["samples"]
    lengths = np.full(count, size["response"])
    if setting == "skewed":
        lengths = np.minimum(random.geometric(1 / MEAN_RESPONSE, count), size["response"])
    return TrainBatch.of_responses(
        tokens=[random.integers(0, size["vocab"], size["prompt"] + n) for n in lengths],
        prompt_lengths=np.full(count, size["prompt"]),
        rollout_log_probs=[np.full(n, -np.log(size["vocab"]), dtype=np.float32) for n in lengths],
        advantages=random.standard_normal(count).astype(np.float32),
    )


def products(size: dict[str, int], tokens: int) -> Callable[[], float]:
    """All products of a step over `tokens` in rows of at most the bound; gives what part of its work was asked for."""
    hidden, query, key = size["hidden"], size["heads"] * size["head_dim"], size["heads"] // 2 * size["head_dim"]
    shapes = [(hidden, query + 2 * key), (query, hidden), (hidden, 2 * size["ffn"]), (size["ffn"], hidden)]
    bound = size["mbs"] * (size["prompt"] + size["response"])
    count = -(-tokens // bound)
    length = -(-tokens // count)
    weights = [[torch.randn(out, into) * 0.02 for into, out in shapes] for _ in range(size["layers"])]
    inputs = [torch.randn(length, into) for into, _ in shapes]
    outputs = [torch.randn(length, out) for _, out in shapes]

    def run() -> float:
        for _ in range(count):
            for layer in weights:
                for given, weight in zip(inputs, layer, strict=True):
                    torch.mm(given, weight.t())
            for layer in reversed(weights):
                for given, gradient, weight in zip(inputs, outputs, layer, strict=True):
                    torch.mm(gradient, weight)
                    torch.mm(gradient.t(), given)
        return tokens / (count * length)

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="skewed")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each")
    add_processor_time(parser)
    arguments = parser.parse_args()
    size, batch = SETTINGS[arguments.setting], make_batch(arguments.setting)
    trainer, clock = timed_trainer(size, processor_time=arguments.processor_time)
    padded, sampling = PaddedSide(trainer), SamplingParams(max_tokens=size["response"])
    limit = products(size, int((batch.lengths - 1).sum()))
    seconds: dict[str, list[float]] = {"rows": [], "padded": [], "products": []}
    for turn in range(arguments.rounds + 1):
        started = clock()
        trainer.train(batch, sampling, 2 * turn + 1)
        rows = clock()
        padded.train(batch, sampling, 2 * turn + 2)
        rectangles = clock()
        share = limit()
        ended = clock()
        if turn:
            for name, value in zip(seconds, (rows - started, rectangles - rows, (ended - rectangles) * share)):
                seconds[name].append(value)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    plans = {"rows": trainer.plan(batch), "padded": padded.plan(batch)}
    counts = {name: len(plan.updates[0].micro_batches) for name, plan in plans.items()}
    print(json.dumps({"setting": arguments.setting, "threads": torch.get_num_threads(), "seconds": median} | counts))
    trainer.close()
    what = f"training step, 29 M parameters, `{arguments.setting}`"
    return report(
        [
            Figure(
                what,
                f"the same in padded rectangles ({counts['padded']} micro-batches, not {counts['rows']})",
                median["padded"] / median["rows"],
                AGAINST_PADDED[arguments.setting],
            ),
            Figure(
                f"products alone, `{arguments.setting}`",
                "the whole training step",
                median["products"] / median["rows"],
                SHARES[arguments.setting],
            ),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
