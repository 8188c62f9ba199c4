"""Run as a program: log-probabilities of prompts with pictures, by an engine or by a trainer of the same folder.

`pictures_process.py engine|trainer|many KIND FOLDER OUT`: the engine generates and scores, and keeps what it did for
the trainer, which has a process of its own; `many` counts placeholders among many sampled tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from rljob_api import RLJobSpec
from rljob_worker.data.dataset import PromptSource
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.models.pictures import PictureFacts
from rljob_worker.models.random_model import make_random_model
from rljob_worker.types import GenerationRequest, Picture, Prompt, SamplingParams

TEXT = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128, "patch_size": 8,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_parameters": ROPE},
        "vision_config": VISION | {"window_size": 32, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "text_config": TEXT | {"head_dim": 32, "rope_parameters": ROPE | {"mrope_interleaved": True}},
        "vision_config": VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    },
}

MANY_SAMPLES, MANY_TOKENS = 105, 240
"""Samples of each of four prompts, and tokens of a sample: 100,800 tokens."""


def spec_of(kind: str, rows: Path) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "steps": 1,
            "model": {"random": {"config": {"model_type": kind, **CONFIGS[kind]}}},
            "data": {"path": str(rows), "imageKey": "images", "labelKey": None, "applyChatTemplate": True},
            "reward": {"name": "length"},
            "algorithm": {"name": "grpo"},
            "rollout": {
                "promptsPerStep": 4, "samplesPerPrompt": 2, "maxResponseTokens": 12, "kvCacheBytes": 2**26,
                "ignoreEos": True,
            },
            "training": {"backend": "FSDP", "precision": "fp32"},
            "resources": {"profile": "cpu", "devicesPerNode": 1, "threadsPerDevice": 1},
            "memorySaver": {"mode": "off"},
        }
    )  # fmt: skip


def write_rows(folder: Path) -> Path:
    """Rows with one, two and no pictures, of several sizes; and one with the first's text and another picture."""
    import PIL.Image

    shapes = {"red": (32, 48), "green": (64, 33), "blue": (20, 40)}
    for number, (name, (height, width)) in enumerate(shapes.items()):
        pixels = np.random.default_rng(number).integers(0, 60, (height, width, 3))
        pixels[..., number] += 180
        PIL.Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{name}.png")
    rows = [
        {"prompt": "what colour ?", "images": "red.png"},
        {"prompt": "<image> beside <image> what colour ?", "images": ["green.png", "blue.png"]},
        {"prompt": "no picture here", "images": None},
        {"prompt": "what colour ?", "images": ["green.png"]},
    ]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def as_json(spec: RLJobSpec) -> Any:
    return json.loads(spec.model_dump_json(by_alias=True, exclude_unset=True))


def features_in(engine: Any) -> list[int]:
    """Count the pictures whose features vLLM's scheduler and its worker remember."""
    core = engine._engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    return [len(core.scheduler.encoder_cache_manager.cached), len(runner.encoder_cache)]


def make_model(spec: RLJobSpec, model: Path) -> list[Prompt]:
    """The folder of a model whose pictures matter, and the prompts of the rows."""
    prepare_tokenizer(spec, model)
    assert spec.model.random is not None
    make_random_model(spec.model.random, model, model)
    weights = load_file(model / "model.safetensors")
    # Larger than a model begins with, so that what it sees matters.
    larger = {name: tensor * 4 if tensor.dim() > 1 else tensor for name, tensor in weights.items()}
    save_file(larger, model / "model.safetensors", metadata={"format": "pt"})
    return PromptSource(spec, load_tokenizer(model)).prompts_of([f"rows/{row}" for row in range(4)])


def in_engine(kind: str, folder: Path) -> dict[str, Any]:
    from rljob_worker.engine.engine import Engine

    spec, model = spec_of(kind, write_rows(folder)), folder / "model"
    prompts = make_model(spec, model)
    facts = PictureFacts.of_folder(model)
    engine = Engine(as_json(spec), index=0, model_folder=str(model), devices=[0])
    engine.start()
    requests = [GenerationRequest(one.token_ids, 7, pictures=one.pictures) for one in prompts]
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, forbidden=facts.placeholders)
    answers = engine.generate(requests, sampling, 0)
    again = engine.generate(requests, sampling, 0)
    tokens = [np.array([*one.token_ids, *answer.token_ids.tolist()]) for one, answer in zip(prompts, answers)]
    pictures = [one.pictures for one in prompts]
    scores = engine.score(tokens, pictures)
    # Another picture of the same size: what the first one showed is not what is remembered of it.
    other = (Picture(255 - pictures[0][0].patches, pictures[0][0].grid, "other", (1, 1), b""),)
    moved = engine.score(tokens[:1], [other])
    remembered = features_in(engine)
    engine.sleep()
    forgotten = features_in(engine)
    engine.shutdown(process_ends=True)
    return {
        "tokens": [one.tolist() for one in tokens],
        "answers": [one.token_ids.tolist() for one in answers],
        "same_again": [one.token_ids.tolist() for one in again] == [one.token_ids.tolist() for one in answers],
        "sampled": [one.log_probs.tolist() for one in answers],
        "scores": [one.tolist() for one in scores],
        "moved_by_picture": float(np.abs(moved[0] - scores[0]).max()),
        "placeholders": list(facts.placeholders),
        "remembered": remembered,
        "forgotten": forgotten,
    }


def many_tokens(kind: str, folder: Path) -> dict[str, Any]:
    """Tokens sampled, and those of them that stand for pictures: with placeholders forbidden, and with none."""
    from rljob_worker.engine.engine import Engine

    spec, model = spec_of(kind, write_rows(folder)), folder / "model"
    lengths = {"max_response_tokens": MANY_TOKENS, "kv_cache_bytes": 2**27}
    spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update=lengths)})
    prompts = make_model(spec, model)
    placeholders = PictureFacts.of_folder(model).placeholders
    engine = Engine(as_json(spec), index=0, model_folder=str(model), devices=[0])
    engine.start()
    counts = {}
    for which, forbidden, each in (("forbidden", placeholders, MANY_SAMPLES), ("allowed", (), 10)):
        requests = [
            GenerationRequest(one.token_ids, seed, pictures=one.pictures) for one in prompts for seed in range(each)
        ]
        sampling = SamplingParams(max_tokens=MANY_TOKENS, ignore_eos=True, forbidden=forbidden)
        tokens = np.concatenate([answer.token_ids for answer in engine.generate(requests, sampling, 0)])
        counts[which] = [len(tokens), int(np.isin(tokens, placeholders).sum())]
    engine.shutdown(process_ends=True)
    return counts


def in_trainer(kind: str, folder: Path, found: dict[str, Any]) -> dict[str, Any]:
    from rljob_worker.trainer.trainer import Trainer

    spec, model = spec_of(kind, folder / "rows.jsonl"), folder / "model"
    prompts = PromptSource(spec, load_tokenizer(model)).prompts_of([f"rows/{row}" for row in range(4)])
    trainer = Trainer(
        as_json(spec), rank=0, world_size=1, store=f"file://{folder}/store", secret="s", model_folder=str(model),
        total_updates=1,
    )  # fmt: skip
    trainer.setup()
    tokens = [np.array(one) for one in found["tokens"]]
    pictures = [one.pictures for one in prompts]
    scores = trainer.score(tokens, pictures=pictures)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, forbidden=tuple(found["placeholders"]))
    sampled = trainer.score(tokens, sampling, pictures)
    ends = [len(answer) for answer in found["answers"]]
    return {
        "prompt_distance": [
            float(np.abs(ours - np.array(theirs)).max()) for ours, theirs in zip(scores, found["scores"], strict=True)
        ],
        "sampled_distance": [
            float(np.abs(ours[-end:] - np.array(theirs)).max())
            for ours, theirs, end in zip(sampled, found["sampled"], ends, strict=True)
        ],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    role, kind, folder, out = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    if role == "trainer":
        result = in_trainer(kind, folder, json.loads(out.read_text()))
    else:
        result = (many_tokens if role == "many" else in_engine)(kind, folder)
        out.write_text(json.dumps(result))
    print("RESULT " + json.dumps(result), flush=True)
