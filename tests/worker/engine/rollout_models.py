"""Small models, specs and requests for rollout tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rljob_worker.engine.seeds import request_seed
from rljob_worker.types import GenerationRequest

WORDS = 60
END, PAD, FIRST_WORD = 1, 2, 3
VOCAB = FIRST_WORD + WORDS + 1
MAX_PROMPT, MAX_RESPONSE = 40, 24


def write_model(folder: Path, *, experts: bool = False) -> Path:
    """A random Qwen3 (hidden 64) whose tokenizer has one token for each of the words w0 ... w59.

    Of 2 layers; with `experts` of 3, of which the first and the last have 8 experts, 2 a token.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(0)
    make, model_class = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if experts else (Qwen3Config, Qwen3ForCausalLM)
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [1]}
    config = make(
        **(moe if experts else {}),
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3 if experts else 2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=END,
        pad_token_id=PAD,
        # The default of 0.02 makes nearly uniform distributions, on which top-p and greedy would prove little.
        initializer_range=0.2,
    )
    model_class(config).float().save_pretrained(folder)
    words = (
        {"<s>": 0, "</s>": END, "<pad>": PAD} | {f"w{i}": FIRST_WORD + i for i in range(WORDS)} | {"<unk>": VOCAB - 1}
    )
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def spec_json(model: Path, *, tensor_parallel: int = 1, engines: int = 1, **rollout: Any) -> dict[str, Any]:
    """A job's spec as the driver hands it to one of the engines of its only node."""
    return {
        "steps": 1,
        "model": {"path": str(model)},
        "data": {"synthetic": {}, "maxPromptTokens": MAX_PROMPT},
        "reward": {"name": "match"},
        "rollout": {
            "promptsPerStep": 8,
            "samplesPerPrompt": 4,
            "maxResponseTokens": MAX_RESPONSE,
            "tensorParallel": tensor_parallel,
            "kvCacheBytes": 2**26,
            **rollout,
        },
        "training": {"precision": "fp32"},
        "resources": {"profile": "cpu", "devicesPerNode": tensor_parallel * engines, "threadsPerDevice": 1},
    }


def group_requests(prompts: int = 8, samples: int = 4, *, step: int = 0) -> list[GenerationRequest]:
    """Requests of one step, prompt-major; prompts of different lengths."""
    random = np.random.default_rng(step)
    tokens = [tuple(random.integers(FIRST_WORD, VOCAB, 3 + 4 * i % MAX_PROMPT).tolist()) for i in range(prompts)]
    return [GenerationRequest(t, request_seed(7, step, i, j)) for i, t in enumerate(tokens) for j in range(samples)]
