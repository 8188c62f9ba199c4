"""Measures the memory of a trainer's step beyond what it keeps between steps; `test_peak_memory.py` starts it.

Called as `python peak_memory.py FOLDER STORE KEPT BLOCK [RANK]`: KEPT and BLOCK are bytes of `algorithms.output_layer`.
With a rank it is one of two with FSDP, and has half of twice as many samples. The last line of its output is a JSON
object.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rljob_worker.algorithms import output_layer
from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import SamplingParams, TrainBatch

M_MMAP_THRESHOLD = -3
PROMPT, LENGTHS = 16, (640, 512, 512, 384)
"""Tokens of each sample's prompt, and of all of it; the four are one row."""
SPEC: dict[str, Any] = {
    "steps": 1,
    "model": {"random": {"config": {"model_type": "qwen3"}}},
    "data": {"synthetic": {}},
    "reward": {"name": "match"},
    "rollout": {"promptsPerStep": 1, "samplesPerPrompt": 4, "maxResponseTokens": max(LENGTHS) - PROMPT},
    "training": {"precision": "fp32", "maxTokensPerMicroBatch": sum(LENGTHS)},
    "resources": {"profile": "cpu"},
    "memorySaver": {"trainMemoryMargin": "0"},
}
RANKS = 2
EQUAL = (512,) * 4
"""Tokens of each sample of a rank with FSDP."""
WITH_FSDP: dict[str, Any] = SPEC | {
    "rollout": SPEC["rollout"] | {"promptsPerStep": RANKS},
    "training": SPEC["training"] | {"backend": "FSDP", "maxTokensPerMicroBatch": sum(EQUAL)},
    "resources": {"profile": "cpu", "devicesPerNode": RANKS},
}


def batch(lengths: tuple[int, ...]) -> TrainBatch:
    random, count = np.random.default_rng(0), len(lengths)
    return TrainBatch.of_responses(
        tokens=[random.integers(0, 100, length) for length in lengths],
        prompt_lengths=np.full(count, PROMPT),
        rollout_log_probs=[np.full(length - PROMPT, -4, dtype=np.float32) for length in lengths],
        advantages=random.standard_normal(count).astype(np.float32),
    )


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main(folder: Path, store: Path, kept: int, block: int, rank: int | None = None) -> None:
    libc = ctypes.CDLL(None)
    # What is freed is given back at once, so that resident is what is in use.
    assert libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    output_layer.KEPT_BYTES["cpu"], output_layer.BLOCK_BYTES["cpu"] = kept, block
    spec, lengths, ranks = (SPEC, LENGTHS, 1) if rank is None else (WITH_FSDP, EQUAL * RANKS, RANKS)
    trainer = Trainer(
        spec,
        rank=rank or 0,
        world_size=ranks,
        store=f"file://{store}",
        secret="of-a-test",
        model_folder=str(folder),
        total_updates=9,
    )
    trainer.setup()
    sampling = SamplingParams(max_tokens=max(LENGTHS))
    trainer.train(batch((PROMPT + 8,) * len(lengths)), sampling, 1)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    report = trainer.train(batch(lengths), sampling, 2)
    assert report.applied, report.detail
    print(json.dumps({"peak": resident("VmHWM") - before, "micro_batches": report.detail["micro_batches"]}))
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
