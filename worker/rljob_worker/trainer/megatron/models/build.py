"""Megatron's GPTModel for one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F

from rljob_worker.models.config import ModelConfig, check_parallel, sequence_parallel
from rljob_worker.trainer.megatron.models.gated_delta_net import GatedDeltaNet, gated_delta_net_spec
from rljob_worker.trainer.megatron.models.kernels import CausalAttention, SequenceParallelRMSNorm, ZeroCenteredRMSNorm
from rljob_worker.trainer.megatron.models.platforms import Platform, megatron_platform

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from rljob_worker.upstream.megatron_types import GptModel


def build_gpt_model(
    cfg: ModelConfig,
    *,
    tp: int,
    pp: int,
    ep: int,
    dtype: torch.dtype,
    recompute: str = "None",
    router_replay: bool = False,
    device: str = "cpu",
    cp_group: dist.ProcessGroup | None = None,
) -> GptModel:
    """This rank's bare GPTModel on the host; weights are uninitialised but for the vocabulary's padding rows and a
    critic's head, zeros.

    `forward(input_ids [B, S], position_ids [B, S], None)` gives logits [B, S, padded vocabulary / tp] in `dtype` on the
    last pipeline stage, hidden states before it: of a batch of equal sequences, or, with `trainer.megatron.rows`, of a
    row of them, where B is 1. Where `sequence_parallel`, S is a multiple of `tp`, and each rank's hidden states are
    those of its share of the positions. A critic's head is a plain layer of one column, whole on each of the ranks.

    Args:
        cfg: the model.
        tp: tensor parallel size, as Megatron's parallel state was initialised with.
        pp: pipeline parallel size.
        ep: expert parallel size; experts that are not dealt out are cut over the tensor-parallel ranks.
        dtype: of parameters and activations, bfloat16 or float32.
        recompute: `None`, `Full` (whole layers) or `Selective` (MLPs), the API's names.
        router_replay: whether routers can be given the experts to take.
        device: kind of device, whose `install` has run.
        cp_group: ranks that divide each row, S being the tokens of one of them; None: rows are whole.

    Raises:
        ValueError: sizes that do not fit the model, or an unknown device.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    platform = megatron_platform(device)
    check_parallel(cfg, tp, pp, ep, 1 if cp_group is None else cp_group.size())
    transformer_config = _transformer_config(cfg, tp, pp, ep, dtype, recompute, router_replay, platform)
    model: GptModel = GPTModel(
        config=transformer_config,
        transformer_layer_spec=_block_spec(cfg, transformer_config, platform),
        vocab_size=cfg.padded_vocab_size(tp),
        max_sequence_length=cfg.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=cfg.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=cfg.rope_theta,
        rotary_percent=cfg.rotary_fraction,
        parallel_output=True,
    )
    if cfg.value_head and model.post_process:
        setattr(model, "output_layer", torch.nn.Linear(cfg.hidden_size, 1, bias=len(cfg.value_head) > 1))  # noqa: B010
    model = model.to(dtype)
    model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq.to(device)
    for module in model.modules():
        if isinstance(module, CausalAttention | GatedDeltaNet):
            module.context_group = cp_group
    _zero_padding_rows(model, cfg, tp)
    return model


def _transformer_config(
    cfg: ModelConfig,
    tp: int,
    pp: int,
    ep: int,
    dtype: torch.dtype,
    recompute: str,
    router_replay: bool,
    platform: Platform,
) -> TransformerConfig:
    from megatron.core.transformer.transformer_config import TransformerConfig

    options: dict[str, object] = {}
    if cfg.num_experts:
        options.update(
            num_moe_experts=cfg.num_experts,
            moe_router_topk=cfg.experts_per_token,
            moe_ffn_hidden_size=cfg.expert_ffn_hidden_size,
            moe_router_pre_softmax=not cfg.normalize_expert_weights,
            moe_router_load_balancing_type="none",
            moe_router_dtype="fp32",
            moe_aux_loss_coeff=0.0,
            moe_token_dispatcher_type="alltoall",
            moe_grouped_gemm=False,
            moe_enable_routing_replay=router_replay,
            moe_layer_freq=[int(moe) for moe in cfg.moe_layers],
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1 if ep > 1 else tp,
        )
    return TransformerConfig(
        num_layers=cfg.num_layers,
        hidden_size=cfg.hidden_size,
        num_attention_heads=cfg.num_heads,
        num_query_groups=cfg.num_query_groups,
        kv_channels=cfg.head_dim,
        ffn_hidden_size=cfg.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=cfg.norm_eps,
        qk_layernorm=cfg.qk_norm,
        attention_output_gate=cfg.output_gate,
        add_bias_linear=False,
        add_qkv_bias=cfg.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        # Not Transformer Engine's: the module that the layer specification names.
        use_te_activation_func=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel(cfg, tp),
        pipeline_model_parallel_size=pp,
        # DistributedDataParallel takes them to the device, into its buffers, without a second copy there.
        use_cpu_initialization=True,
        cuda_graph_scope=[],
        perform_initialization=False,
        # Fused kernels are those of libraries that are not used; what is fused here, the layers' modules are.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=not platform.keep_pipeline_outputs,
        **_recompute_options(cfg, recompute),
        **options,
    )


def _recompute_options(cfg: ModelConfig, recompute: str) -> dict[str, object]:
    if recompute == "None":
        return {}
    if recompute == "Full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "Selective":
        # Attention's scores are never kept by the fused kernel; what is left is the MLPs' wide activations.
        modules = [name for name, used in (("mlp", not all(cfg.moe_layers)), ("moe", any(cfg.moe_layers))) if used]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    raise ValueError(f"recompute {recompute!r} is not known; use 'None', 'Full' or 'Selective'")


def _block_spec(
    cfg: ModelConfig, transformer_config: TransformerConfig, platform: Platform
) -> TransformerBlockSubmodules:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    spec = get_gpt_decoder_block_spec(transformer_config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = platform.attention
        mlp = layer.submodules.mlp.submodules
        getattr(mlp, "experts", layer.submodules.mlp).submodules.activation_func = platform.activation
        if transformer_config.sequence_parallel:
            _replace_norms(layer, SequenceParallelRMSNorm)
            spec.layer_norm = SequenceParallelRMSNorm
        if cfg.output_gate:
            from rljob_worker.trainer.megatron.models.gated_attention import GatedSelfAttention

            layer.submodules.self_attention.module = GatedSelfAttention
        if cfg.zero_centered_norms:
            _replace_norms(layer, ZeroCenteredRMSNorm)
            spec.layer_norm = ZeroCenteredRMSNorm
    if cfg.linear_attention is not None:
        attention = gated_delta_net_spec(cfg.linear_attention)
        first = get_transformer_layer_offset(transformer_config)
        spec.layer_specs = [
            _with_attention(layer, attention) if cfg.is_linear(first + index) else layer
            for index, layer in enumerate(spec.layer_specs)
        ]
    return spec


def _replace_norms(layer: ModuleSpec, norm: type[torch.nn.Module]) -> None:
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = norm


def _with_attention(layer: ModuleSpec, attention: ModuleSpec) -> ModuleSpec:
    """Megatron's layers of one kind are one object."""
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))


def _zero_padding_rows(model: torch.nn.Module, cfg: ModelConfig, tp: int) -> None:
    """Uninitialised memory may hold NaN. These rows are loaded from nowhere, and a critic's head from some folders."""
    from megatron.core import parallel_state

    rows = cfg.padded_vocab_size(tp) // tp
    real_rows = max(0, min(rows, cfg.vocab_size - rows * parallel_state.get_tensor_model_parallel_rank()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if cfg.value_head and name.startswith("output_layer."):
                parameter.zero_()
            elif name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                parameter[real_rows:].zero_()
