"""Megatron's GPTModel for one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rljob_worker.models.config import ModelConfig, check_parallel


class CausalAttention(torch.nn.Module):
    """Megatron's core attention on torch's fused kernel: causal, grouped queries, no mask, no dropout."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_kwargs: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Context [S, B, H * D] of query [S, B, H, D], key and value [S, B, G, D]."""
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise ValueError("causal attention takes no mask, bias or packing: pad batches on the right")
        context = F.scaled_dot_product_attention(
            _heads_first(query),
            _heads_first(key),
            _heads_first(value),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return context.permute(2, 0, 1, 3).flatten(2).to(query.dtype)


class SwiGLU(torch.nn.Module):
    """Megatron's gated activation, silu(gate) * up of [..., 2 F] = gate beside up, in as few passes as torch allows.

    Megatron's own expression adds an offset of zero and joins the gradients of the two halves by a copy: on CPU that is
    2 % of a training step.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        """[..., F] of [..., 2 F]."""
        out: torch.Tensor = _SwiGLUFunction.apply(gate_and_up)
        return out


class _SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_and_up)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return result


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """[S, B, H, D] -> contiguous float32 [B, H, S, D].

    On CPU the kernel's backward is twice as fast on contiguous inputs, and five times as fast in float32 as in bfloat16
    where the processor has no bfloat16 arithmetic.
    """
    return tensor.permute(1, 2, 0, 3).to(torch.float32, memory_format=torch.contiguous_format)


def build_gpt_model(
    cfg: ModelConfig, *, tp: int, pp: int, ep: int, dtype: torch.dtype, recompute: str = "None", device: str = "cpu"
) -> torch.nn.Module:
    """This rank's bare GPTModel, weights uninitialised but for the vocabulary's padding rows, which are zero.

    `forward(input_ids [B, S], position_ids [B, S], None)` gives logits [B, S, padded vocabulary / tp] in `dtype` on the
    last pipeline stage, hidden states before it. Batches are padded on the right.

    Args:
        cfg: the model.
        tp: tensor parallel size, as Megatron's parallel state was initialised with.
        pp: pipeline parallel size.
        ep: expert parallel size (expert tensor parallel size is 1).
        dtype: of parameters and activations, bfloat16 or float32.
        recompute: `None`, `Full` (whole layers) or `Selective` (MLPs), the API's names.
        device: `cpu`.

    Raises:
        ValueError: sizes that do not fit the model, or a device that is not built.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    if device != "cpu":
        raise ValueError(f"device {device!r} is not built in this version; use 'cpu'")
    check_parallel(cfg, tp, pp, ep, device=device)
    transformer_config = _transformer_config(cfg, tp, pp, ep, dtype, recompute)
    model = GPTModel(
        config=transformer_config,
        transformer_layer_spec=_block_spec(transformer_config),
        vocab_size=cfg.padded_vocab_size(tp),
        max_sequence_length=cfg.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=cfg.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=cfg.rope_theta,
        rotary_percent=1.0,
        parallel_output=True,
    ).to(dtype)
    _zero_padding_rows(model, cfg, tp)
    return model


def _transformer_config(cfg: ModelConfig, tp: int, pp: int, ep: int, dtype: torch.dtype, recompute: str) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    options: dict[str, Any] = {}
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
            moe_layer_freq=[int(moe) for moe in cfg.moe_layers],
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1,
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
        pipeline_model_parallel_size=pp,
        use_cpu_initialization=True,
        cuda_graph_scope=[],
        perform_initialization=False,
        # Fused kernels are CUDA's.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=False,
        **_recompute_options(cfg, recompute),
        **options,
    )


def _recompute_options(cfg: ModelConfig, recompute: str) -> dict[str, Any]:
    if recompute == "None":
        return {}
    if recompute == "Full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "Selective":
        # Attention's scores are never kept by the fused kernel; what is left is the MLPs' wide activations.
        modules = [name for name, used in (("mlp", not all(cfg.moe_layers)), ("moe", any(cfg.moe_layers))) if used]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    raise ValueError(f"recompute {recompute!r} is not known; use 'None', 'Full' or 'Selective'")


def _block_spec(transformer_config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(transformer_config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
        mlp = layer.submodules.mlp.submodules
        getattr(mlp, "experts", layer.submodules.mlp).submodules.activation_func = SwiGLU
    return spec


def _zero_padding_rows(model: torch.nn.Module, cfg: ModelConfig, tp: int) -> None:
    """Uninitialised memory may hold NaN, and these rows are loaded from nowhere."""
    from megatron.core import parallel_state

    rows = cfg.padded_vocab_size(tp) // tp
    real_rows = max(0, min(rows, cfg.vocab_size - rows * parallel_state.get_tensor_model_parallel_rank()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                parameter[real_rows:].zero_()
