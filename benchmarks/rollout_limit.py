"""A CPU rollout against the time of its products alone.

64 responses of 75 tokens in the mean and 256 at most, 8 of each prompt, by the 29 M model of `rollout_vs_vllm.py --case
large`. The limit is all matrix products of the layers, packed as the engine packs them, with weights of their own for
each layer: each prompt once, and then step by step as many rows as there are responses that still go on. Both take
turns in one process.

    python benchmarks/rollout_limit.py [--rounds N] [--threads N] [--processor-time]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from figures import Figure, add_processor_time, report
from rollout_vs_vllm import CASES, Case, begin_again_as_an_engine, spec_of, write_model

from rljob_worker.engine.seeds import request_seed
from rljob_worker.types import GenerationRequest, IntArray, SamplingParams

MEAN_RESPONSE = 76
SHARE = 0.42


def skewed(case: Case) -> IntArray:
    """Lengths of the responses, those of a prompt side by side."""
    lengths = np.random.default_rng(0).geometric(1 / MEAN_RESPONSE, case.prompts * case.samples)
    return np.minimum(lengths, case.tokens)


def schedule(case: Case, lengths: IntArray) -> list[int]:
    """Rows of each step: the prompts, which give the first tokens, and then the responses that go on."""
    return [case.prompts * case.prompt_tokens, *(int((lengths > step).sum()) for step in range(1, int(lengths.max())))]


def products(case: Case, steps: Sequence[int]) -> Callable[[], None]:
    """All products of the layers at each step."""
    import torch

    from rljob_worker.devices import packed_linear

    model = case.model
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    query, key = (model[name] * model["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = [(hidden, query + 2 * key), (query, hidden), (hidden, 2 * inner), (inner, hidden)]
    layers = [
        [packed_linear.pack(torch.randn(out, into) * 0.02) for into, out in shapes]
        for _ in range(model["num_hidden_layers"])
    ]
    inputs = [torch.randn(max(steps), into) for into, _ in shapes]

    def run() -> None:
        for rows in steps:
            given = [each[:rows] for each in inputs]
            for layer in layers:
                for x, weight in zip(given, layer, strict=True):
                    packed_linear.multiply(weight, x, None)

    return run


def requests(case: Case, lengths: IntArray, turn: int) -> list[GenerationRequest]:
    """A round of them, with other prompts in each."""
    random = np.random.default_rng(turn)
    prompts = random.integers(3, case.model["vocab_size"], (case.prompts, case.prompt_tokens)).tolist()
    return [
        GenerationRequest(
            tuple(prompts[number // case.samples]),
            request_seed(0, turn, number // case.samples, number % case.samples),
            max_tokens=int(length),
        )
        for number, length in enumerate(lengths)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    add_processor_time(parser)
    arguments = parser.parse_args()
    threads, clock = arguments.threads, time.perf_counter
    if arguments.processor_time:
        threads, clock = 1, time.process_time
    begin_again_as_an_engine(threads)
    from rljob_worker.engine.engine import Engine

    case = replace(CASES["large"], tokens=256, model=CASES["large"].model | {"vocab_size": 64})
    lengths = skewed(case)
    limit = products(case, schedule(case, lengths))
    sampling = SamplingParams(max_tokens=case.tokens, ignore_eos=True)
    seconds: dict[str, list[float]] = {"rollout": [], "products": []}
    with tempfile.TemporaryDirectory() as name:
        folder = str(Path(name) / "model")
        write_model(case, folder)
        engine = Engine(spec_of(case, folder, threads), index=0, model_folder=folder, devices=["host:cpu:0"])
        engine.start()
        for turn in range(arguments.rounds + 1):
            asked = requests(case, lengths, turn)
            started = clock()
            responses = engine.generate(asked, sampling, 0)
            generated = clock()
            limit()
            ended = clock()
            assert [len(response.token_ids) for response in responses] == lengths.tolist()
            if turn:  # the first round warms both up
                seconds["rollout"].append(generated - started)
                seconds["products"].append(ended - generated)
        engine.shutdown()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(json.dumps({"tokens": int(lengths.sum()), "steps": int(lengths.max()), "threads": threads} | median))
    return report(
        [
            Figure(
                "products alone, rollout of skewed lengths, 29 M parameters",
                "the whole rollout",
                median["products"] / median["rollout"],
                SHARE,
            )
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
