"""Rollout speed: RLJob's engine against plain `vllm.LLM.generate`, same prompts, seeds and settings, one run.

Both run in this process on one engine each and take turns, so that a busy machine slows both down alike. Prints a line
and its row with the limit; exits with 1 below it.

    python benchmarks/rollout_vs_vllm.py [--case small|large] [--rounds 15] [--threads 2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, report

from rljob_api import RLJobSpec
from rljob_worker.engine.environment import engine_environment
from rljob_worker.engine.seeds import request_seed
from rljob_worker.types import GenerationRequest, SamplingParams

LIMIT = 0.9


@dataclass(frozen=True)
class Case:
    name: str
    model: dict[str, int]
    prompts: int
    samples: int
    prompt_tokens: int
    tokens: int
    rounds: int


CASES = {
    "small": Case(
        "hidden 128, 2 layers, 32 prompts x 8 samples x 8 tokens",
        dict(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
        ),
        32,
        8,
        8,
        8,
        15,
    ),
    "large": Case(
        "29 M parameters (hidden 512, 8 layers), 8 prompts x 8 samples x 128 tokens",
        dict(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
        ),
        8,
        8,
        16,
        128,
        2,
    ),
}


def spec_of(case: Case, model: str, threads: int) -> dict[str, Any]:
    return {
        "steps": 1,
        "model": {"path": model},
        "data": {"synthetic": {}, "maxPromptTokens": case.prompt_tokens},
        "reward": {"name": "match"},
        "rollout": {
            "promptsPerStep": case.prompts,
            "samplesPerPrompt": case.samples,
            "maxResponseTokens": case.tokens,
            "kvCacheBytes": 2**29,
        },
        "training": {"precision": "fp32"},
        "resources": {"profile": "cpu", "devicesPerNode": 1, "threadsPerDevice": threads},
    }


def write_model(case: Case, folder: str) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    others = {"max_position_embeddings": 512, "tie_word_embeddings": False, "eos_token_id": 1}
    config = Qwen3Config.from_dict(case.model | others)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)


def plain_llm(case: Case, folder: str) -> Any:
    from vllm import LLM

    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        logprobs_mode="processed_logprobs",
        enforce_eager=True,
        max_num_seqs=case.prompts * case.samples,
        max_model_len=case.prompt_tokens + case.tokens,
        kv_cache_memory_bytes=2**29,
    )


def plain_generate(llm: Any, case: Case, requests: list[GenerationRequest]) -> list[list[int]]:
    from vllm import SamplingParams as VllmSamplingParams

    prompts = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests]
    params = [
        VllmSamplingParams(
            temperature=1.0, seed=request.seed, max_tokens=case.tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        for request in requests
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def run(case: Case, folder: str, rounds: int, threads: int) -> Figure:
    from rljob_worker.engine.engine import Engine

    write_model(case, folder)
    llm = plain_llm(case, folder)
    engine = Engine(spec_of(case, folder, threads), index=0, model_folder=folder, devices=["host:cpu:0"])
    engine.start()
    sampling = SamplingParams(max_tokens=case.tokens, ignore_eos=True)
    random = np.random.default_rng(0)
    ours, theirs = [], []
    for step in range(rounds + 1):
        prompts = random.integers(3, case.model["vocab_size"], (case.prompts, case.prompt_tokens)).tolist()
        requests = [
            GenerationRequest(tuple(prompt), request_seed(0, step, i, j))
            for i, prompt in enumerate(prompts)
            for j in range(case.samples)
        ]
        seconds, tokens = {}, {}
        # Whoever comes second finds the caches of the first one's work: take turns.
        for who in ("ours", "theirs") if step % 2 else ("theirs", "ours"):
            begin = time.perf_counter()
            if who == "ours":
                tokens[who] = [response.token_ids.tolist() for response in engine.generate(requests, sampling, 0)]
            else:
                tokens[who] = plain_generate(llm, case, requests)
            seconds[who] = time.perf_counter() - begin
        # The tokens differ: RLJob's engine draws its own noise.
        for who, generated in tokens.items():
            assert [len(response) for response in generated] == [case.tokens] * len(requests), who
        if step:  # the first round warms both up
            ours.append(seconds["ours"])
            theirs.append(seconds["theirs"])
    engine.shutdown()
    ratio = statistics.median(b / a for a, b in zip(ours, theirs))
    count = case.prompts * case.samples * case.tokens
    print(
        f"{case.name}: RLJob {count / statistics.median(ours):.0f} tokens/s ({1e3 * statistics.median(ours):.0f} ms), "
        f"vllm.LLM.generate {count / statistics.median(theirs):.0f} tokens/s "
        f"({1e3 * statistics.median(theirs):.0f} ms); ratio {ratio:.2f} (median of {rounds} rounds)",
        flush=True,
    )
    return Figure(f"rollout tokens/s, {case.name}", "`vllm.LLM.generate`, same prompts and settings", ratio, LIMIT)


def begin_again_as_an_engine(threads: int) -> None:
    """Replace this process by the same one with an engine's environment; nothing in that one."""
    if "RLJOB_BENCHMARK_CHILD" in os.environ:
        return
    spec = RLJobSpec.model_validate(spec_of(CASES["small"], "unused", threads))
    environment = os.environ | engine_environment(spec) | {"RLJOB_BENCHMARK_CHILD": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="default: 15 of small, 3 of large")
    parser.add_argument("--case", choices=sorted(CASES), default="small", help="default: small")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    arguments = parser.parse_args()
    begin_again_as_an_engine(arguments.threads)
    case = CASES[arguments.case]
    with tempfile.TemporaryDirectory() as folder:
        return report([run(case, str(Path(folder) / "model"), arguments.rounds or case.rounds, arguments.threads)])


if __name__ == "__main__":
    sys.exit(main())
