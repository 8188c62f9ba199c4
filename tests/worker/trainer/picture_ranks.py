"""Trains on rows with pictures on ranks of which some have text alone; `test_picture_ranks.py` starts it.

Called as `python picture_ranks.py RANK RANKS FOLDER` in as many processes as there are ranks; the last line of the
output is a JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from pictures_process import as_json, spec_of

from rljob_worker.data.dataset import PromptSource
from rljob_worker.data.tokenizer import load_tokenizer
from rljob_worker.models.pictures import PictureFacts, batch_pictures
from rljob_worker.trainer.fsdp.model import ShardedModel
from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import SamplingParams, TrainBatch

KIND = "qwen2_5_vl"
ONE, TWO, TEXT = "rows/0", "rows/1", "rows/2"
BATCHES = ([ONE, TEXT, TEXT, TEXT, TWO, TEXT, TEXT, TEXT], [TEXT] * 8)
"""In each of two updates one sample has pictures, so that one rank has none; then there are none at all."""
RESPONSE = 6
SAMPLING = SamplingParams(max_tokens=RESPONSE)


def spec_on(ranks: int, folder: Path) -> dict[str, Any]:
    spec: dict[str, Any] = as_json(spec_of(KIND, folder / "rows.jsonl"))
    spec["training"] |= {"globalBatchSize": 4, "optimizer": {"lr": 1e-3, "eps": 1e-6}}
    return spec | {"resources": {"profile": "cpu", "devicesPerNode": ranks}}


def batch_of(rows: list[str], folder: Path, seed: int) -> TrainBatch:
    source = PromptSource(spec_of(KIND, folder / "rows.jsonl"), load_tokenizer(folder / "model"))
    facts, random = PictureFacts.of_folder(folder / "model"), np.random.default_rng(seed)
    prompts = source.prompts_of(rows)
    words = np.setdiff1d(np.concatenate([one.token_ids for one in prompts]), facts.placeholders)
    tokens = [np.array([*one.token_ids, *random.choice(words, RESPONSE)]) for one in prompts]
    return TrainBatch.of_responses(
        tokens,
        np.array([len(one.token_ids) for one in prompts]),
        [np.full(RESPONSE, -2, np.float32) for _ in prompts],
        random.standard_normal(len(prompts)).astype(np.float32),
        pictures=batch_pictures(tokens, [one.pictures for one in prompts], facts),
    )


def main(rank: int, ranks: int, folder: Path) -> None:
    trainer = Trainer(
        spec_on(ranks, folder), rank=rank, world_size=ranks, store=f"file://{folder}/store-{ranks}", secret="of-a-test",
        model_folder=str(folder / "model"), total_updates=9,
    )  # fmt: skip
    trainer.setup()
    seen: list[bool] = []
    tokens, metrics = ShardedModel.tokens, []

    def noting(self: ShardedModel, share: Any, wanted: Any) -> Any:
        if torch.is_grad_enabled():
            seen.append(share.inputs.patches is not None)
        return tokens(self, share, wanted)

    with mock.patch.object(ShardedModel, "tokens", noting):
        for number, rows in enumerate(BATCHES):
            batch = batch_of(rows, folder, number)
            trainer.log_probs(batch, SAMPLING)
            report = trainer.train(batch, SAMPLING, number + 1)
            assert report.applied, report.detail
            metrics.append(report.metrics)
    trainer.close()
    print(json.dumps({"seen": seen, "metrics": metrics}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
