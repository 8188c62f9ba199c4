"""Configs that are allowed, and cuts of a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from model_cases import CONFIGS
from support import qwen3_5

from rljob_worker.errors import UserError
from rljob_worker.models.config import ModelConfig, check_parallel
from rljob_worker.models.facts import LinearAttention, ModelFacts


@pytest.mark.parametrize("config", [*CONFIGS.values(), qwen3_5.config()], ids=[*CONFIGS, "qwen3_5"])
def test_facts_are_those_of_the_model_that_is_trained(config: dict[str, object]) -> None:
    facts, model = ModelFacts.from_hf(config), ModelConfig.from_hf(config)
    assert asdict(facts).items() <= asdict(model).items()


def test_facts_are_there_of_models_that_megatron_does_not_train() -> None:
    llama = CONFIGS["qwen2"] | {"model_type": "llama", "tie_word_embeddings": True}
    facts = ModelFacts.from_hf(llama)
    assert (facts.model_type, facts.tied_embeddings, facts.language_half) == ("llama", True, False)
    assert not any(facts.moe_layers)
    deepseek = {"model_type": "deepseek_v3", "num_hidden_layers": 4, "first_k_dense_replace": 3}
    assert ModelFacts.from_hf(deepseek).moe_layers == (False, False, False, True)
    gemma = ModelFacts.from_hf({"model_type": "gemma3", "text_config": {"num_hidden_layers": 3, "vocab_size": 77}})
    assert (gemma.vocab_size, gemma.num_layers, gemma.language_half) == (77, 3, True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type None is no model that transformers has"),
        ({"model_type": ["qwen3"]}, r"model_type \['qwen3'\] is no model that transformers has"),
        ({"model_type": "t5"}, "has no max_position_embeddings; it must be the config of a decoder-only model"),
        ({"model_type": "gemma3", "text_config": 3}, "text_config must be an object"),
        ({"model_type": "gemma3", "text_config": {"model_type": {"a": 1}}}, r"text_config.model_type must be the name"),
    ],
)
def test_what_has_no_facts_is_named(config: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelFacts.from_hf(config)


def test_fields_of_each_type() -> None:
    qwen2 = ModelConfig.from_hf(CONFIGS["qwen2"])
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim, qwen2.num_experts) == (True, False, 16, 0)
    qwen3 = ModelConfig.from_hf(CONFIGS["qwen3_tied"])
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim, qwen3.tied_embeddings) == (False, True, 32, True)
    moe = ModelConfig.from_hf(CONFIGS["qwen3_moe_mixed"])
    assert (moe.num_experts, moe.moe_layers, moe.normalize_expert_weights) == (4, (True, False), False)
    assert ModelConfig.from_hf(CONFIGS["qwen3_moe"] | {"decoder_sparse_step": 2}).moe_layers == (False, True)


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}]
)
def test_rope_theta_old_and_new_spelling(rope: dict[str, object]) -> None:
    assert ModelConfig.from_hf(CONFIGS["qwen3"] | rope).rope_theta == 5e5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported; use qwen2, qwen3, qwen3_moe, qwen3_5"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
        ({"rope_theta": None}, "rope_theta None is not supported; it must be a number above 0"),
        ({"rope_theta": -1}, "rope_theta -1 is not supported"),
        ({"num_labels": 10**30}, "num_labels 1000000000000000000000000000000 is too large; at most 1000000"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "sliding-window attention is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; it must be 'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is not supported"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not divisible by num_key_value_heads \(3\)"),
        ({"hidden_size": "wide"}, "hidden_size 'wide' is no size"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers 1000000000 is no size; .* at most 1000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1 is no size"),
        ({"vocab_size": 10**9}, "vocab_size 1000000000 is no size; .* at most 16777216"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings 1000000000 is no size; .* at most 16777216"),
    ],
)
def test_unsupported_settings_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(CONFIGS["qwen3"] | change)


def test_sizes_without_end_are_named_at_once() -> None:
    """transformers makes a list with an entry a layer."""
    moe = CONFIGS["qwen3_moe"]
    for change, message in (
        ({"num_experts": 10**9}, "num_experts 1000000000 is no size"),
        ({"num_experts": 4000, "num_hidden_layers": 1000}, "num_experts 4000 is too many for 1000 layers; at most 200"),
    ):
        with pytest.raises(UserError, match=message):
            ModelConfig.from_hf(moe | change)
    with pytest.raises(UserError, match="num_hidden_layers 1000000000 is no size"):
        ModelConfig.from_hf(qwen3_5.config(num_hidden_layers=10**9))


def test_qwen3_5_by_default_is_the_9b_model() -> None:
    """transformers' defaults are those of the model that `examples/qwen3.5-9b-grpo-4xnpu.yaml` trains."""
    from transformers import AutoConfig

    cfg = ModelConfig.from_hf(AutoConfig.for_model("qwen3_5").to_dict())
    assert (cfg.hidden_size, cfg.num_layers, cfg.num_heads, cfg.num_query_groups) == (4096, 32, 16, 4)
    assert (cfg.head_dim, cfg.rotary_fraction, cfg.output_gate, cfg.zero_centered_norms) == (256, 0.25, True, True)
    assert not cfg.tied_embeddings
    assert cfg.linear_attention == LinearAttention(16, 32, 128, 128, 4)
    assert cfg.linear_layers == (True, True, True, False) * 8
    check_parallel(cfg, 4, 1, 1)
    with pytest.raises(ValueError, match=r"linear_num_key_heads \(16\) is not divisible by tensorParallel \(32\)"):
        check_parallel(cfg, 32, 1, 1)


@pytest.mark.parametrize(
    ("whole", "text", "message"),
    [
        ({"model_type": "qwen3_5_moe"}, {}, "'qwen3_5_moe' is not supported: .*shared expert.*; use qwen2, .*qwen3_5$"),
        (
            {"model_type": "qwen3_5_text"},
            {},
            "'qwen3_5_text' is not supported: vLLM 0.23 has no model for",
        ),
        ({"text_config": None}, {}, "text_config must be an object, the language half's config; got None"),
        ({"tie_word_embeddings": True}, {}, "tie_word_embeddings must be the same beside text_config and in it"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config is not supported"),
        ({}, {"attn_output_gate": False}, "text_config.attn_output_gate must be true"),
        ({}, {"output_gate_type": "sigmoid"}, "text_config.output_gate_type 'sigmoid' is not supported; use 'swish'"),
        (
            {},
            {"linear_num_key_heads": 3},
            r"linear_num_value_heads \(4\) is not divisible by linear_num_key",
        ),
        ({}, {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "sliding-window attention"),
        ({}, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_unsupported_settings_of_a_model_that_sees_are_named(
    whole: dict[str, object], text: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        ModelConfig.from_hf(qwen3_5.config(**text) | whole)


def test_folder_without_or_with_broken_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("qwen3", (4, 1, 1), r"num_key_value_heads \(2\) is not divisible by tensorParallel \(4\)"),
        ("qwen3", (3, 1, 1), r"num_attention_heads \(4\).*num_key_value_heads \(2\).*intermediate_size \(128\)"),
        ("qwen3", (1, 3, 1), r"num_hidden_layers \(2\) is not divisible by pipelineParallel \(3\)"),
        ("qwen3", (1, 1, 2), r"expertParallel \(2\) needs a mixture-of-experts model"),
        ("qwen3_moe", (1, 1, 3), r"num_experts \(4\) is not divisible by expertParallel \(3\)"),
        ("qwen3_moe", (64, 1, 1), r"moe_intermediate_size \(32\) is not divisible by tensorParallel \(64\)"),
    ],
)
def test_impossible_parallel_sizes(name: str, sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_parallel(ModelConfig.from_hf(CONFIGS[name]), *sizes)


def test_possible_parallel_sizes() -> None:
    check_parallel(ModelConfig.from_hf(CONFIGS["qwen3"]), 2, 2, 1)
    check_parallel(ModelConfig.from_hf(CONFIGS["qwen3_moe"]), 1, 2, 4)
    check_parallel(ModelConfig.from_hf(CONFIGS["qwen3_moe"]), 2, 1, 1)
