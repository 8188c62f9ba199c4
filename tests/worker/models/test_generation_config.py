"""The sampling that an exported model says it was trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from rljob_api.spec import RolloutSpec
from rljob_worker.models.generation_config import write_generation_config


def rollout(**fields: Any) -> RolloutSpec:
    return RolloutSpec.model_validate({"promptsPerStep": 1, "samplesPerPrompt": 1, "maxResponseTokens": 512, **fields})


def test_transformers_reads_the_sampling_as_trained(tmp_path: Path) -> None:
    write_generation_config(tmp_path, rollout(temperature=0.7, topP=0.9), {"eos_token_id": 2, "model_type": "qwen3"})
    read = GenerationConfig.from_pretrained(tmp_path)
    assert (read.do_sample, read.temperature, read.top_p, read.max_new_tokens) == (True, 0.7, 0.9, 512)
    # Its own default is 50.
    assert read.top_k == 0
    assert read.eos_token_id == 2
    read.validate(strict=True)


def test_token_ids_of_the_model_stay_and_its_sampling_does_not(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [151645, 151643], "pad_token_id": 5, "temperature": 0.6, "top_k": 20}))
    write_generation_config(tmp_path, rollout(stopTokenIds=[7, 151643], topK=3), {"eos_token_id": 1, "bos_token_id": 4})
    written = json.loads(path.read_text())
    assert written["eos_token_id"] == [151645, 151643, 7]
    assert (written["pad_token_id"], written["bos_token_id"]) == (5, 4)
    assert (written["temperature"], written["top_k"]) == (1.0, 3)
